"""The shares that adapters of low rank have in a product, each row its own adapter's."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import Tensor


class AdapterWeights(NamedTuple):
    """All adapters that one product [K] -> [N] has, by place in the pool.

    The outputs of a merged product belong to parts, each with inputs of its own: queries, keys and
    values have one A each. A part of rank 0 adds nothing.
    """

    a: Tensor  # [S, P, R, K]: the first ranks[s, p] rows of each part count
    b: Tensor  # [S, R, N]
    ranks: Tensor  # i32[S, P], at most R
    scales: Tensor  # f32[S, P]
    spans: Tensor  # i64[G, 3] the parts' outputs: first, end, part; ascending


class AddAdapters(Protocol):
    """Compute add_adapters_reference."""

    def __call__(self, y: Tensor, x: Tensor, places: Tensor, weights: AdapterWeights) -> None: ...


def add_adapters_reference(y: Tensor, x: Tensor, places: Tensor, weights: AdapterWeights) -> None:
    """Add scale * B A x of each row's adapter to y [T, N], in place; x [T, K].

    places i32[T]: that of a row's adapter, -1 for a row without one. Everything is computed in
    float32 and rounded once, to y's dtype. A row depends on itself alone.
    """
    ranks, scales = weights.ranks.tolist(), weights.scales.tolist()
    for token, place in enumerate(places.tolist()):
        if place < 0:
            continue
        for first, end, part in weights.spans.tolist():
            rank = ranks[place][part]
            low = weights.a[place, part, :rank].float() @ x[token].float()
            share = low @ weights.b[place, :rank, first:end].float() * scales[place][part]
            y[token, first:end] = y[token, first:end] + share
