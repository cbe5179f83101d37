"""The linear attention of Qwen3-Next and Qwen3.5: convolution, gated delta rule, gated norm."""

from __future__ import annotations

from collections.abc import Set

import torch
from torch import Tensor

from surestep_worker.cache.caches import Caches
from surestep_worker.checkpoint.parameters import Parameter, TensorSource
from surestep_worker.configs.layer_sizes import DeltaModelConfig

from .context import LayerContext, Product, StepBatch
from .linear import Sharding, ShardSlice, are_alike, take_linear

Outputs = list[tuple[str, ShardSlice]]


def delta_net_table(
    to: str, at: str, config: DeltaModelConfig, shard: Sharding, names: Set[str]
) -> dict[str, Parameter]:
    """Parameters of the layer whose tensors begin with `at`.

    Whatever the order in the checkpoint, the projections end up as [queries, keys, values, gates]
    and [betas, decays], each by head: in one projection, where the checkpoint, which has tensors of
    these `names`, keeps both in one form. Of quantised ones the small part is often plain.
    """
    delta, width = config.delta, config.hidden_size
    grouped = config.grouped_projection
    qkvz, ba = (_grouped if grouped else _separate)(at, config, shard)
    channels = [part for _, part in _separate(at, config, shard)[0][:3]]
    heads = shard.part(delta.num_v_heads)
    if are_alike([name for name, _ in (*qkvz, *ba)], names):
        projections = shard.columns(f"{to}qkvz", [*qkvz, *ba], width, bias=False)
    else:
        projections = shard.columns(f"{to}qkvz", qkvz, width, bias=False)
        projections |= shard.columns(f"{to}ba", ba, width, bias=False)
    conv = tuple(
        TensorSource(f"{at}conv1d.weight", (delta.channels, 1, delta.taps), part.keep)
        for part in channels
    )
    return {
        **projections,
        f"{to}conv": Parameter((sum(part.size for part in channels), 1, delta.taps), conv),
        f"{to}a_log": shard.vector(f"{at}A_log", heads),
        f"{to}dt_bias": shard.vector(f"{at}dt_bias", heads),
        f"{to}norm": shard.whole(f"{at}norm.weight", delta.v_dim),
        **shard.rows(
            f"{to}out",
            f"{at}out_proj",
            width,
            shard.part(delta.num_v_heads, delta.v_dim),
            bias=False,
        ),
    }


def _separate(at: str, config: DeltaModelConfig, shard: Sharding) -> tuple[Outputs, Outputs]:
    """Take a tensor for queries, keys and values, and one each for gates, betas and decays."""
    delta = config.delta
    k, v = shard.part(delta.num_k_heads, delta.k_dim), shard.part(delta.num_v_heads, delta.v_dim)
    heads = shard.part(delta.num_v_heads)

    def within(part: ShardSlice, offset: int) -> tuple[str, ShardSlice]:
        keep = slice(offset + part.keep.start, offset + part.keep.stop)
        return f"{at}in_proj_qkv", ShardSlice(delta.channels, keep)

    qkv = [within(k, 0), within(k, k.total), within(v, 2 * k.total)]
    ba = [(f"{at}in_proj_b", heads), (f"{at}in_proj_a", heads)]
    return [*qkv, (f"{at}in_proj_z", v)], ba


def _grouped(at: str, config: DeltaModelConfig, shard: Sharding) -> tuple[Outputs, Outputs]:
    """Two tensors in which each key head's queries, keys, values and gates lie together."""
    delta = config.delta
    repeats = delta.num_v_heads // delta.num_k_heads
    groups = shard.part(delta.num_k_heads).keep

    def parts(name: str, sizes: list[int]) -> Outputs:
        group = sum(sizes)
        return [
            (f"{at}{name}", ShardSlice(group * delta.num_k_heads, slice(start, start + size)))
            for i, size in enumerate(sizes)
            for start in range(groups.start * group + sum(sizes[:i]), groups.stop * group, group)
        ]

    values = repeats * delta.v_dim
    qkvz = parts("in_proj_qkvz", [delta.k_dim, delta.k_dim, values, values])
    return qkvz, parts("in_proj_ba", [repeats, repeats])


class GatedDeltaNet:
    """Gated delta layer of a rank. Keeps its state in `cache_layer` of the recurrent cache."""

    def __init__(self, to: str, context: LayerContext[DeltaModelConfig], cache_layer: int) -> None:
        config, weights, kernels = context.config, context.weights, context.kernels
        delta, num_ranks = config.delta, context.shard.tp.size
        self._ops = kernels
        self._eps = config.rms_norm_eps
        self._cache_layer = cache_layer
        self._v_heads = delta.num_v_heads // num_ranks
        self._channels = delta.channels // num_ranks
        self._v_dim = delta.v_dim
        self._qkvz = take_linear(weights, f"{to}qkvz", kernels)
        apart = f"{to}ba" in weights
        self._ba = take_linear(weights, f"{to}ba", kernels) if apart else None
        self._conv = weights.take(f"{to}conv", torch.float32, lambda taps: taps.squeeze(1).t())
        self._a_log = weights.take(f"{to}a_log", torch.float32)
        self._dt_bias = weights.take(f"{to}dt_bias", torch.float32)
        self._norm = weights.take(f"{to}norm", torch.float32)
        self._out = take_linear(weights, f"{to}out", kernels)

    def __call__(self, x: Tensor, batch: StepBatch, caches: Caches) -> Product:
        """[T, H] -> [T, H], to be summed over the ranks."""
        ops = self._ops
        assert caches.recurrent is not None
        assert batch.recurrent is not None
        cache = caches.recurrent.layers[self._cache_layer]
        made, gates_end = ops.linear(x, self._qkvz), self._channels + self._v_heads * self._v_dim
        mixed, ba = made[:, : self._channels], made[:, gates_end:]
        if self._ba is not None:
            ba = ops.linear(x, self._ba)
        gate = made[:, self._channels : gates_end].unflatten(1, (self._v_heads, self._v_dim))
        qkv = ops.causal_conv(mixed, self._conv, cache.conv, batch.recurrent)
        out = ops.gated_delta(qkv, ba, self._a_log, self._dt_bias, cache.delta, batch.recurrent)
        out = ops.rms_norm_gated(out, gate, self._norm, self._eps)
        return Product(out.flatten(1), self._out)
