"""Decoder layers of attention and a gated feed-forward block on one device, as one op."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from surestep_kernels.linear import PackedLinear
from surestep_kernels.paged_attention import AttentionRows
from surestep_kernels.project_heads import HeadProjection
from surestep_kernels.store_kv import LayerCache


@dataclass(frozen=True, slots=True, eq=False)
class DenseLayer:
    """The weights of a layer without gates, and how its tokens attend."""

    projection: HeadProjection  # without others
    scale: float  # of the scores
    window: int  # see PagedAttention
    sinks: Tensor | None
    out: PackedLinear  # behind attention
    post_norm: Tensor  # f32[H] of what the feed-forward block reads
    gate_up: PackedLinear
    down: PackedLinear
    eps: float  # of the norms around the blocks


@dataclass(slots=True, eq=False)
class LayerTokens:
    """The T tokens of a step as the layers of one KV group see them."""

    positions: Tensor  # i64[T]
    rows: AttentionRows
    kv_slots: Tensor  # i64[T], see StoreKV
    prepared: Any = None  # by the first layer, if its kernels have a form of their own


class RunDenseLayers(Protocol):
    """Run the layers from number `first` on, as many as there are `places`, on x [T, K].

    x is normalised for the first of them. Returns [T, H], normalised with the norm behind the last.
    The stream `residual` [T, H] is moved on in place. `places`: a layer's tokens, and its cache.
    """

    def __call__(
        self,
        x: Tensor,
        residual: Tensor,
        places: Sequence[tuple[LayerTokens, LayerCache]],
        first: int = 0,
    ) -> Tensor: ...
