"""Latent attention (MLA) of DeepSeek-V2 and later, and the indexer of V3.2 that makes it sparse.

Keys and values of all heads are projections of one latent a token. Here they are never made: the
first is multiplied into queries, the second into what attention sums up, for prompts as for windows
and single tokens. So there is one result, and one latent and one rotated key are all that is kept.

Where a checkpoint rotates pairs of elements, the outputs of the projections are put in order when
they are loaded, all first elements before all second ones: then halves are rotated, as everywhere.
"""

from __future__ import annotations

import torch
from surestep_kernels import KernelSet, PackedLinear, QuantizedWeight
from surestep_kernels.latent_attention import store_latents
from torch import Tensor
from torch.nn import functional

from surestep_worker.adapters.kernels import plain_kernels
from surestep_worker.cache.caches import Caches
from surestep_worker.checkpoint.parameters import CheckpointWeights, Parameter, TensorSource
from surestep_worker.checkpoint.prepared import Weights
from surestep_worker.configs.layer_sizes import IndexerConfig, LatentConfig, LatentModelConfig

from .context import GroupPages, LayerContext, Product, StepBatch
from .linear import Sharding, ShardSlice, pack, take_linear

_EPS = 1e-6  # of the norms inside, whatever the model's: as in transformers


def latent_attention_table(
    to: str, at: str, config: LatentModelConfig, shard: Sharding, *, indexer: bool
) -> dict[str, Parameter]:
    """Parameters of the layer whose tensors begin with `at`. Ranks share out heads; what makes
    latents and index keys is whole on every rank."""
    sizes, width = config.latent, config.hidden_size
    assert sizes is not None
    heads, inputs = shard.part(config.num_heads), sizes.q_rank or width
    query = shard.part(config.num_heads, sizes.nope_dim + sizes.rope_dim)
    named = "q_proj" if sizes.q_rank is None else "q_b_proj"
    latent = _whole(f"{at}kv_a_proj_with_mqa", sizes.rank + sizes.rope_dim)
    table = {
        **shard.columns(f"{to}q", [(f"{at}{named}", query)], inputs, bias=False),
        **shard.columns(f"{to}latent", [latent], width, bias=False),
        f"{to}latent_norm": shard.whole(f"{at}kv_a_layernorm.weight", sizes.rank),
        **shard.rows(
            f"{to}o", f"{at}o_proj", width, shard.part(config.num_heads, sizes.v_dim), bias=False
        ),
    }
    if sizes.q_rank is not None:
        table |= shard.columns(f"{to}q_a", [_whole(f"{at}q_a_proj", inputs)], width, bias=False)
        table[f"{to}q_norm"] = shard.whole(f"{at}q_a_layernorm.weight", inputs)
    per_head = sizes.nope_dim + sizes.v_dim
    shape = config.num_heads * per_head, sizes.rank
    for i, head in enumerate(range(heads.keep.start, heads.keep.stop)):
        first, middle = head * per_head, head * per_head + sizes.nope_dim
        for name, rows in (("k", (first, middle)), ("v", (middle, first + per_head))):
            source = TensorSource(f"{at}kv_b_proj.weight", shape, slice(*rows))
            table[f"{to}{name}.{i}.weight"] = Parameter(
                (rows[1] - rows[0], sizes.rank), (source,), linear=True
            )
    return table | _indexer_table(to, at, config, shard) if indexer else table


def _indexer_table(
    to: str, at: str, config: LatentModelConfig, shard: Sharding
) -> dict[str, Parameter]:
    sizes, latent, width = config.indexer, config.latent, config.hidden_size
    assert sizes is not None
    assert latent is not None
    assert latent.q_rank is not None
    at = f"{at}indexer."
    query, weights = (
        _whole(f"{at}wq_b", sizes.heads * sizes.dim),
        (f"{at}weights_proj", sizes.heads),
    )
    return {
        **shard.columns(f"{to}index_q", [query], latent.q_rank, bias=False),
        **shard.columns(f"{to}index_k", [_whole(f"{at}wk", sizes.dim)], width, bias=False),
        **shard.columns(f"{to}index_weights", [_whole(*weights)], width, bias=False, exact=True),
        f"{to}index_norm": shard.whole(f"{at}k_norm.weight", sizes.dim),
        f"{to}index_bias": shard.whole(f"{at}k_norm.bias", sizes.dim),
    }


def _whole(name: str, size: int) -> tuple[str, ShardSlice]:
    return name, ShardSlice(size, slice(0, size))


def rotation_order(size: int, *, interleaved: bool) -> Tensor:
    """Return the order i64[size] in which halves are rotated where pairs, or halves, were."""
    order = torch.arange(size)
    return order.view(-1, 2).T.flatten() if interleaved else order


def _take_rows(weights: Weights, name: str, kernels: KernelSet, order: Tensor) -> PackedLinear:
    """Read a linear layer whose outputs are put in this order."""

    def read(checkpoint: CheckpointWeights) -> PackedLinear:
        weight = checkpoint.take_linear(f"{name}.weight")
        ordered = weight.rows(order) if isinstance(weight, QuantizedWeight) else weight[order]
        return pack(kernels, ordered, None, checkpoint.dtype)

    return weights.take_packed(name, read)


def _take_transposed(weights: Weights, name: str, kernels: KernelSet) -> PackedLinear:
    """Read the transpose of a weight: dequantised, for scales are of groups of inputs."""

    def read(checkpoint: CheckpointWeights) -> PackedLinear:
        weight = checkpoint.take_linear(f"{name}.weight")
        if isinstance(weight, QuantizedWeight):
            weight = weight.dequantize().to(checkpoint.dtype)
        return kernels.pack_linear(weight.T.contiguous(), None)

    return weights.take_packed(name, read)


class LatentAttention:
    """Latent attention of a rank. Keeps its latents in layer `cache_layer` of the KV cache."""

    def __init__(self, to: str, context: LayerContext[LatentModelConfig], cache_layer: int) -> None:
        config, weights, kernels = context.config, context.weights, context.kernels
        sizes = config.latent
        assert sizes is not None
        self._ops, self._attend = kernels, kernels.latent.attend
        self._cache_layer, self._rotary, self._sizes = cache_layer, context.rotary, sizes
        self._heads = config.num_heads // context.shard.tp.size
        self._q_a, self._q_norm = None, None
        if sizes.q_rank is not None:
            self._q_a = take_linear(weights, f"{to}q_a", kernels)
            self._q_norm = weights.take(f"{to}q_norm", torch.float32)
        self._q = _take_rows(weights, f"{to}q", kernels, _query_order(sizes, self._heads))
        turned = rotation_order(sizes.rope_dim, interleaved=sizes.interleaved)
        order = torch.cat((torch.arange(sizes.rank), sizes.rank + turned))
        self._latent = _take_rows(weights, f"{to}latent", kernels, order)
        self._norm = weights.take(f"{to}latent_norm", torch.float32)
        heads = range(self._heads)
        plain = plain_kernels(kernels)  # of a layer whose other half is multiplied transposed
        self._k = plain.pack_heads([_take_transposed(weights, f"{to}k.{i}", plain) for i in heads])
        self._v = plain.pack_heads([take_linear(weights, f"{to}v.{i}", plain) for i in heads])
        self._multiply_heads = plain.multiply_heads
        self._o = take_linear(weights, f"{to}o", kernels)
        # Ranks that choose differently would all compute the same wrong sum, and never notice.
        self._compared = context.shard.tp.size > 1
        has_own = f"{to}index_q" in weights
        self._indexer = Indexer(to, context, config.indexer) if has_own else None

    def __call__(self, x: Tensor, batch: StepBatch, caches: Caches) -> Product:
        """[T, H] -> [T, H], to be summed over the ranks."""
        ops, sizes, heads = self._ops, self._sizes, self._heads
        cache, pages = caches.kv.layer(self._cache_layer, batch.groups)
        queries = x
        if self._q_a is not None and self._q_norm is not None:
            queries = ops.rms_norm(ops.linear(x, self._q_a), self._q_norm, _EPS)
        q, latent = ops.linear(queries, self._q), ops.linear(x, self._latent)
        plain, turned = q.split([heads * sizes.nope_dim, heads * sizes.rope_dim], dim=1)
        turned = turned.unflatten(1, (heads, sizes.rope_dim))
        ops.rotary(turned, latent[:, sizes.rank :].unsqueeze(1), batch.positions, self._rotary)
        latent[:, : sizes.rank] = ops.rms_norm(latent[:, : sizes.rank], self._norm, _EPS)
        store_latents(latent, cache.k, pages.kv_slots)
        if self._indexer is not None:
            positions = self._indexer(x, queries, batch.positions, cache.v, pages)
            batch.choice.choose(positions, compared=self._compared)
        absorbed = self._multiply_heads(plain.unflatten(1, (heads, sizes.nope_dim)), self._k)
        q = torch.cat((absorbed, turned), dim=2)
        chosen = batch.choice.positions
        seen = self._attend(q, cache.k, pages.rows, sizes.scale, sizes.rank, chosen)
        return Product(self._multiply_heads(seen, self._v).flatten(1), self._o)


def _query_order(sizes: LatentConfig, heads: int) -> Tensor:
    """Order a projection's outputs: of all heads the part without rotation, then the rotated."""
    rows = torch.arange(heads * (sizes.nope_dim + sizes.rope_dim)).view(heads, -1)
    turned = rotation_order(sizes.rope_dim, interleaved=sizes.interleaved)
    plain, rotated = rows[:, : sizes.nope_dim], rows[:, sizes.nope_dim :][:, turned]
    return torch.cat((plain.flatten(), rotated.flatten()))


class Indexer:
    """Chooses the positions that a token attends to; the same on every rank."""

    def __init__(
        self, to: str, context: LayerContext[LatentModelConfig], sizes: IndexerConfig | None
    ) -> None:
        weights, kernels = context.weights, context.kernels
        assert sizes is not None
        self._ops, self._choose, self._sizes = kernels, kernels.latent.choose, sizes
        self._rotary = context.rotary
        rope_dim = context.config.rotary_dim
        turned = rotation_order(rope_dim, interleaved=sizes.interleaved)
        order = torch.cat((turned, torch.arange(rope_dim, sizes.dim)))
        by_head = torch.arange(sizes.heads)[:, None] * sizes.dim + order
        self._q = _take_rows(weights, f"{to}index_q", kernels, by_head.flatten())
        self._k = _take_rows(weights, f"{to}index_k", kernels, order)
        self._norm, self._bias = (
            weights.take(f"{to}{name}", torch.float32, lambda whole: whole[order])
            for name in ("index_norm", "index_bias")
        )
        scale = (sizes.heads * sizes.dim) ** -0.5

        def read(checkpoint: CheckpointWeights) -> PackedLinear:
            weight = checkpoint.take(f"{to}index_weights.weight", torch.float32)
            return kernels.pack_linear(weight * scale, None)

        self._weights = weights.take_packed(f"{to}index_weights", read)

    def __call__(
        self, x: Tensor, queries: Tensor, positions: Tensor, keys: Tensor, pages: GroupPages
    ) -> Tensor:
        """Keep the index keys of x [T, H]; return i32[T, top_k], see choose_reference."""
        ops, sizes = self._ops, self._sizes
        q = ops.linear(queries, self._q).unflatten(1, (sizes.heads, sizes.dim))
        made = ops.linear(x, self._k).float()
        key = functional.layer_norm(made, (sizes.dim,), self._norm, self._bias, _EPS).to(x.dtype)
        ops.rotary(q, key.unsqueeze(1), positions, self._rotary)
        store_latents(key, keys, pages.kv_slots)
        weights = ops.linear(x.float(), self._weights)
        return self._choose(q, weights, keys, pages.rows, sizes.top_k)
