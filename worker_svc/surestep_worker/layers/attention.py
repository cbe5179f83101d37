"""Attention over the paged cache, with norms, gates, sinks and windows where a model has them."""

from __future__ import annotations

import torch
from surestep_kernels.dense_layer import DenseLayer, LayerTokens
from surestep_kernels.project_heads import HeadProjection
from surestep_kernels.store_kv import LayerCache
from torch import Tensor

from surestep_worker.cache.caches import Caches
from surestep_worker.checkpoint.parameters import Parameter
from surestep_worker.configs.model_config import SLIDING_ATTENTION, ModelConfig

from .context import LayerContext, Product, StepBatch, take_norm
from .linear import Sharding, ShardSlice, take_linear
from .mlp import GatedMlp


def attention_table(
    to: str, at: str, config: ModelConfig, shard: Sharding, inputs: int | None = None
) -> dict[str, Parameter]:
    """Parameters of the layer whose tensors begin with `at`: one projection, heads in order
    [queries, gates if any, keys, values], and the one behind attention.

    `inputs` of the former are those of the model's width, unless they are given.
    """
    width, dim = config.hidden_size, config.head_dim
    heads, kv = shard.part(config.num_heads, dim), shard.part(config.num_kv_heads, dim)
    queries = (
        _queries_and_gates(at, config, shard) if config.attention_gate else [(f"{at}q_proj", heads)]
    )
    projections = [*queries, (f"{at}k_proj", kv), (f"{at}v_proj", kv)]
    table = {
        **shard.columns(f"{to}qkv", projections, inputs or width, bias=config.qkv_bias),
        **shard.rows(f"{to}o", f"{at}o_proj", width, heads, bias=config.o_bias),
    }
    if config.attention_sinks:
        table[f"{to}sinks"] = shard.vector(f"{at}sinks", shard.part(config.num_heads))
    if config.qk_norm:
        for name, part in (("q_norm", heads), ("k_norm", kv)):
            size = part.size if config.joint_qk_norm else dim
            table[f"{to}{name}"] = shard.whole(f"{at}{name}.weight", size)
    return table


def _queries_and_gates(
    at: str, config: ModelConfig, shard: Sharding
) -> list[tuple[str, ShardSlice]]:
    """In a checkpoint the query and the gate of each head lie together; here all queries come
    first."""
    dim, heads = config.head_dim, shard.part(config.num_heads)
    total = 2 * config.num_heads * dim

    def halves(offset: int) -> list[tuple[str, ShardSlice]]:
        starts = [2 * dim * head + offset for head in range(heads.keep.start, heads.keep.stop)]
        return [(f"{at}q_proj", ShardSlice(total, slice(start, start + dim))) for start in starts]

    return [*halves(0), *halves(dim)]


class Attention:
    """Attention of a rank. Keeps its keys and values in layer `cache_layer` of the KV cache."""

    def __init__(
        self, to: str, context: LayerContext[ModelConfig], cache_layer: int, *, window: int = 0
    ) -> None:
        """Take the layer's parameters; with a `window` a token sees that many, itself included."""
        config, kernels, ranks = context.config, context.kernels, context.shard.tp.size
        heads = config.num_heads // ranks

        def head_norm(name: str) -> Tensor | None:
            return take_norm(context, f"{to}{name}") if config.qk_norm else None

        self._ops = kernels
        self._cache_layer = cache_layer
        self._scale = config.attention_scale or config.head_dim**-0.5
        self._softcap = config.attention_softcap
        self._gated = config.attention_gate
        self._projection = HeadProjection(
            packed=take_linear(context.weights, f"{to}qkv", kernels),
            head_dim=config.head_dim,
            num_heads=heads,
            num_others=heads if self._gated else 0,
            num_kv_heads=max(1, config.num_kv_heads // ranks),
            cos_sin=context.rotary,
            q_norm=head_norm("q_norm"),
            k_norm=head_norm("k_norm"),
            eps=config.rms_norm_eps,
        )
        self._window, self._sinks = window, None
        if config.attention_sinks:
            self._sinks = context.weights.take(f"{to}sinks", torch.float32)
        self._o = take_linear(context.weights, f"{to}o", kernels)

    def with_mlp(
        self, mlp: GatedMlp, post_norm: Tensor, context: LayerContext[ModelConfig]
    ) -> DenseLayer | None:
        """Return the layer that this rank could run as one op; None: it has gates or a soft cap."""
        if self._gated or self._softcap:
            return None
        return DenseLayer(
            self._projection,
            self._scale,
            self._window,
            self._sinks,
            self._o,
            post_norm,
            mlp.gate_up,
            mlp.down,
            context.config.rms_norm_eps,
        )

    def pages(self, batch: StepBatch, caches: Caches) -> tuple[LayerTokens, LayerCache]:
        """Return the tokens of a step as this layer sees them, and its cache."""
        cache, tokens = caches.kv.layer(self._cache_layer, batch.layer_tokens)
        return tokens, cache

    def store(self, x: Tensor, batch: StepBatch, caches: Caches) -> None:
        """Store the keys and values of x [T, H]."""
        cache, pages = caches.kv.layer(self._cache_layer, batch.groups)
        self._ops.project_heads(x, self._projection, batch.positions, cache, pages.kv_slots)

    def __call__(self, x: Tensor, batch: StepBatch, caches: Caches) -> Product:
        """[T, H] -> [T, H], to be summed over the ranks."""
        ops, cache, pages = self._ops, *caches.kv.layer(self._cache_layer, batch.groups)
        q, gate = ops.project_heads(x, self._projection, batch.positions, cache, pages.kv_slots)
        out = ops.paged_attention(
            q,
            cache,
            pages.rows,
            self._scale,
            window=self._window,
            sinks=self._sinks,
            softcap=self._softcap,
        ).flatten(1)
        if self._gated:
            ops.mul_sigmoid(out, gate.flatten(1))
        return Product(out, self._o)


def sliding_attention(to: str, context: LayerContext[ModelConfig], cache_layer: int) -> Attention:
    """Make a layer whose tokens see the model's sliding window."""
    if context.local_rotary is not None:
        context = context._replace(rotary=context.local_rotary)
    return Attention(to, context, cache_layer, window=context.config.window_of(SLIDING_ATTENTION))
