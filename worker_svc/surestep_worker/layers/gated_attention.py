"""Gated attention: a sigmoid gate per output element, normalised heads, partial rotation."""

from __future__ import annotations

from typing import TYPE_CHECKING

from surestep_kernels import KernelSet
from surestep_kernels.head_projection import HeadProjection
from torch import Tensor

from surestep_worker.batch import StepBatch
from surestep_worker.caches import Caches
from surestep_worker.models.prepared import Weights
from surestep_worker.models.weights import Parameter

from .linear import Part, Sharding, take_linear
from .norm import take_zero_centred
from .residual import Product

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
        kv_heads = max(1, config.num_kv_heads // num_ranks)
        heads = config.num_heads // num_ranks
        self._ops = kernels
        self._cache_layer = cache_layer
        self._scale = config.head_dim**-0.5
        self._projection = HeadProjection(
            packed=take_linear(weights, f"{to}qgkv", kernels),
            head_dim=config.head_dim,
            num_heads=heads,
            num_others=heads,
            num_kv_heads=kv_heads,
            cos_sin=rotary,
            q_norm=take_zero_centred(weights, f"{to}q_norm"),
            k_norm=take_zero_centred(weights, f"{to}k_norm"),
            eps=config.rms_norm_eps,
        )
        self._o = take_linear(weights, f"{to}o", kernels)

    def __call__(self, x: Tensor, batch: StepBatch, caches: Caches) -> Product:
        """[T, H] -> [T, H], to be summed over the ranks."""
        ops, cache = self._ops, caches.kv.layers[self._cache_layer]
        q, gate = ops.project_heads(x, self._projection, batch.positions, cache, batch.kv_slots)
        out = ops.paged_attention(q, cache, batch.rows, self._scale).flatten(1)
        ops.mul_sigmoid(out, gate.flatten(1))
        return Product(out, self._o)
