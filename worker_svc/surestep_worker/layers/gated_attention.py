"""Gated attention: a sigmoid gate per output element, normalised heads, partial rotation."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from surestep_kernels import KernelSet
from torch import Tensor

from surestep_worker.batch import StepBatch
from surestep_worker.caches import Caches
from surestep_worker.models.prepared import Weights
from surestep_worker.models.weights import Parameter

from .linear import Part, Sharding, take_linear
from .norm import take_zero_centred

if TYPE_CHECKING:
    from surestep_worker.models.hybrid_config import HybridConfig


def attention_table(
    to: str, at: str, config: HybridConfig, shard: Sharding
) -> dict[str, Parameter]:
    """Parameters of the layer whose tensors begin with `at`.

    In a checkpoint the query and the gate of each head lie together; here all queries come first.
    """
    width, dim = config.hidden_size, config.head_dim
    heads, kv = shard.part(config.num_heads), shard.part(config.num_kv_heads, dim)
    total = 2 * config.num_heads * dim

    def halves(offset: int) -> list[tuple[str, Part]]:
        starts = [2 * dim * head + offset for head in range(heads.keep.start, heads.keep.stop)]
        return [(f"{at}q_proj", Part(total, slice(start, start + dim))) for start in starts]

    projections = [*halves(0), *halves(dim), (f"{at}k_proj", kv), (f"{at}v_proj", kv)]
    out = shard.part(config.num_heads, dim)
    return {
        **shard.columns(f"{to}qgkv", projections, width, bias=config.qkv_bias),
        **shard.rows(f"{to}o", f"{at}o_proj", width, out, bias=config.o_bias),
        f"{to}q_norm": shard.whole(f"{at}q_norm.weight", dim),
        f"{to}k_norm": shard.whole(f"{at}k_norm.weight", dim),
    }


class GatedAttention:
    """One layer on one rank; its keys and values lie in layer `cache_layer` of the KV cache."""

    def __init__(
        self,
        to: str,
        config: HybridConfig,
        weights: Weights,
        kernels: KernelSet,
        rotary: Tensor,
        num_ranks: int,
        cache_layer: int,
    ) -> None:
        self._config = config
        self._ops = kernels
        self._rotary = rotary
        self._cache_layer = cache_layer
        self._num_heads = config.num_heads // num_ranks
        self._num_kv_heads = max(1, config.num_kv_heads // num_ranks)
        self._qgkv = take_linear(weights, f"{to}qgkv", kernels)
        self._o = take_linear(weights, f"{to}o", kernels)
        self._q_norm = take_zero_centred(weights, f"{to}q_norm")
        self._k_norm = take_zero_centred(weights, f"{to}k_norm")

    def __call__(self, x: Tensor, batch: StepBatch, caches: Caches) -> Tensor:
        """[T, H] -> [T, H], to be summed over the ranks."""
        ops, dim, heads = self._ops, self._config.head_dim, self._num_heads
        cache = caches.kv.layers[self._cache_layer]
        projected = ops.linear(x, self._qgkv).unflatten(1, (-1, dim))
        sizes = [heads, heads, self._num_kv_heads, self._num_kv_heads]
        q, gate, k, v = torch.split(projected, sizes, dim=1)
        eps = self._config.rms_norm_eps
        q, k = ops.rms_norm(q, self._q_norm, eps), ops.rms_norm(k, self._k_norm, eps)
        ops.rotary(q, k, batch.positions, self._rotary)
        ops.store_kv(k, v, cache, batch.kv_slots)
        out = ops.paged_attention(q, cache, batch.rows, dim**-0.5).flatten(1)
        ops.mul_sigmoid(out, gate.flatten(1))
        return ops.linear(out, self._o)
