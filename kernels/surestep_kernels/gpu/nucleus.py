"""Which tokens of a row may be drawn, without sorting: min_p, top_k and top_p as one limit.

Every rule keeps a leading part of the order "smallest gap first, then lowest id", so that what is
left is all tokens up to some (gap, id). The bits of gaps, which are not negative, order like whole
numbers: the limit's bits are found from the highest to the lowest, one pass over the row for each.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from surestep_kernels.choose import DrawParams

_BLOCK = 2048
_NO_ID: tl.constexpr = tl.constexpr(2147483647)
_INF_BITS: tl.constexpr = tl.constexpr(0x7F800000)


@triton.jit
def is_finite(x):
    """Whether a row has a greatest logit to draw from."""
    return (x > float("-inf")) & (x < float("inf"))


@triton.jit
def kept(gap, ids, limit_ptr):
    """Which tokens lie within the limit i32[2]."""
    bits = gap.to(tl.int32, bitcast=True)
    last = tl.load(limit_ptr)
    return (bits < last) | ((bits == last) & (ids <= tl.load(limit_ptr + 1)))


@triton.jit
def _gap_bits(row_ptr, first, V, peak, temperature, BLOCK: tl.constexpr):
    """Gaps of some tokens as bits; greater than any gap's behind the last token."""
    ids = first + tl.arange(0, BLOCK)
    z = tl.load(row_ptr + ids, mask=ids < V, other=float("-inf"))
    gap = tl.div_rn(peak - z, tl.full((BLOCK,), 0.0, tl.float32) + temperature)
    return tl.where(ids < V, gap.to(tl.int32, bitcast=True), _NO_ID)


@triton.jit
def _count_below(row_ptr, V, peak, temperature, limit, BLOCK: tl.constexpr):
    """How many tokens have gaps whose bits are below the limit."""
    count = tl.zeros((BLOCK,), tl.int32)
    for first in range(0, V, BLOCK):
        bits = _gap_bits(row_ptr, first, V, peak, temperature, BLOCK)
        count += (bits < limit).to(tl.int32)
    return tl.sum(count, axis=0)


@triton.jit
def _mass_below(row_ptr, V, peak, temperature, limit, BLOCK: tl.constexpr):
    """Their mass; that of the best token is 1."""
    mass = tl.zeros((BLOCK,), tl.float64)
    for first in range(0, V, BLOCK):
        bits = _gap_bits(row_ptr, first, V, peak, temperature, BLOCK)
        mass += _weight(tl.where(bits < limit, bits, _INF_BITS))
    return tl.sum(mass, axis=0)


@triton.jit
def _weight(bits):
    return tl.exp(-bits.to(tl.float32, bitcast=True)).to(tl.float64)


@triton.jit
def _last_of(row_ptr, V, peak, temperature, limit, quota, BLOCK: tl.constexpr):
    """Id of the quota-th token whose gap has exactly these bits; no bound if there are fewer."""
    found = tl.full((BLOCK,), _NO_ID, tl.int32)
    before = tl.zeros((BLOCK,), tl.int32)
    for first in range(0, V, BLOCK):
        equal = (_gap_bits(row_ptr, first, V, peak, temperature, BLOCK) == limit).to(tl.int32)
        rank = before + tl.cumsum(equal, axis=0)
        hit = (equal > 0) & (rank == quota)
        found = tl.minimum(found, tl.where(hit, first + tl.arange(0, BLOCK), _NO_ID))
        before += tl.sum(equal, axis=0)
    return tl.min(found, axis=0)


@triton.jit
def _limit_kernel(
    z_ptr,  # f32[N, V]
    peak_ptr, window_ptr,  # f32[N], i32[N]
    temperature_ptr, max_gap_ptr, top_k_ptr, top_p_ptr,  # [V]
    limit_ptr,  # i32[N, 2]
    V,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    window, peak = tl.load(window_ptr + row), tl.load(peak_ptr + row)
    t, row_ptr = tl.load(temperature_ptr + window), z_ptr + row * V
    if (t > 0) & is_finite(peak):
        # min_p: a bound on gaps. top_k: the bits of the k-th gap, and how many of its equals.
        limit = tl.load(max_gap_ptr + window).to(tl.int32, bitcast=True)
        quota, k = _NO_ID, tl.load(top_k_ptr + window)
        if k < _count_below(row_ptr, V, peak, t, limit + 1, BLOCK):
            limit = limit * 0
            for i in range(31):
                candidate = limit | (1 << (30 - i))
                few = _count_below(row_ptr, V, peak, t, candidate, BLOCK) < k
                limit = tl.where(few, candidate, limit)
            quota = k - _count_below(row_ptr, V, peak, t, limit, BLOCK)
        top_p = tl.load(top_p_ptr + window)
        if top_p < float("inf"):
            limit, quota = _nucleus(row_ptr, V, peak, t, limit, quota, top_p, BLOCK)
        tl.store(limit_ptr + 2 * row, limit)
        tl.store(limit_ptr + 2 * row + 1, _last_of(row_ptr, V, peak, t, limit, quota, BLOCK))


@triton.jit
def _nucleus(row_ptr, V, peak, t, limit, quota, top_p, BLOCK: tl.constexpr):
    """The limit behind which the mass in front of a token is top_p of what is left or more."""
    equals = _count_below(row_ptr, V, peak, t, limit + 1, BLOCK)
    equals = tl.minimum(quota, equals - _count_below(row_ptr, V, peak, t, limit, BLOCK))
    left = _mass_below(row_ptr, V, peak, t, limit, BLOCK) + equals * _weight(limit)
    target = top_p.to(tl.float64) * left
    nucleus = limit * 0
    for i in range(31):
        candidate = tl.minimum(nucleus | (1 << (30 - i)), limit)
        before = _mass_below(row_ptr, V, peak, t, candidate, BLOCK)
        nucleus = tl.where(before < target, candidate, nucleus)
    before = _mass_below(row_ptr, V, peak, t, nucleus, BLOCK)
    fits = tl.ceil((target - before) / tl.maximum(_weight(nucleus), 1e-300))
    fits = tl.minimum(fits, 2147483646.0).to(tl.int32)
    return nucleus, tl.where(nucleus == limit, tl.minimum(quota, fits), fits)


def find_limits(z: Tensor, peak: Tensor, window: Tensor, params: DrawParams) -> Tensor:
    """The limit i32[N, 2] of each row of z f32[N, V] with its maximum peak f32[N]; rows at
    temperature 0 have none."""
    rows, vocab = z.shape
    limits = torch.empty(rows, 2, dtype=torch.int32, device=z.device)
    _limit_kernel[(rows,)](
        z, peak, window, params.temperature, params.max_gap, params.top_k, params.top_p,
        limits, vocab, BLOCK=_BLOCK,
    )  # fmt: skip
    return limits
