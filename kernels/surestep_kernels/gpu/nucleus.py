"""Draws from a part of the vocabulary, without sorting it: min_p, top_k and top_p as one limit.

Every rule keeps a leading part of the order "smallest gap first, then lowest id", so that what is
left is all tokens up to some key. Few tokens can be near the limit, so most rows are settled by a
list of them:

1. `near`: the pass for the maximum leaves the best tokens of 4096 lanes. The WANTED-th of these (or
   the k-th) says how far candidates go: there are as many at least, and hardly more.
2. `_gather_kernel`, programs for the parts of a row: candidates go to the list. If top_p alone
   measures, it adds up the mass of the row too; else parts without a candidate are not read again.
3. `_settle_kernel`, a program per row: finds the limit in the list, two bits of it at a time, and
   draws. Where the list overflows, or does not reach the limit, it searches the row itself, and
   the pass that draws from whole rows draws from this one.

Positions in the list depend on who comes first. Nothing else does: counts and masses are whole
numbers, and the draw is a maximum.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from surestep_kernels.choose import DrawParams

from .dependent_launch import DependentKernel, wait_for_earlier_kernels
from .gumbel import gumbel, row_key
from .limit import limit_of
from .mass import mass_of, mass_wanted
from .vocab import LANES, LINES, append, best_of, gap_bits, ids_of, key_of

CAPACITY = 4096  # candidates that the list of a row has room for
WANTED = 2048  # lanes whose best token is to be a candidate
PROGRAMS = 1056  # that take parts of rows in turn: 8 for each of 132 multiprocessors
PART_WARPS = 8  # of these: 8 tokens of a tile for each thread, whose keys are i64
ROW_BLOCK = 4096  # tokens that a program looks at together which searches a whole row
_ROW_WARPS = 16
_TILE: tl.constexpr = tl.constexpr(LANES * LINES)
_LANES: tl.constexpr = tl.constexpr(LANES)
_NEVER: tl.constexpr = tl.constexpr(9223372036854775807)
_LAST_FINITE: tl.constexpr = tl.constexpr(0x7F7FFFFF)
_BEYOND: tl.constexpr = tl.constexpr(0x7FFFFFFF)


class Lists(NamedTuple):
    """Which rows are drawn how, and candidates; made by the kernels of a step from nothing."""

    counts: Tensor  # i32[2] rows that restrict what they draw from; rows to be drawn whole
    restricted: Tensor  # i32[N]
    whole: Tensor  # i32[N]
    limit: Tensor  # i64[N] key of the last token that may be drawn
    near: Tensor  # i32[N] bits of the gap up to which tokens are candidates
    listed: Tensor  # i32[N] how many there are, in the list or not
    keys: Tensor  # i64[N, CAPACITY]
    masses: Tensor  # i64[N, parts]

    @classmethod
    def for_rows(cls, rows: int, parts: int, *, truncated: bool, device: torch.device) -> Lists:
        """Without values."""

        def empty(dtype: torch.dtype, *shape: int) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        some = rows if truncated else 0
        return cls(
            counts=empty(torch.int32, 2),
            restricted=empty(torch.int32, some),
            whole=empty(torch.int32, rows),
            limit=empty(torch.int64, rows),
            near=empty(torch.int32, some),
            listed=empty(torch.int32, some),
            keys=empty(torch.int64, some, CAPACITY),
            masses=empty(torch.int64, some, parts),
        )


@triton.jit
def last_gap(max_gap_ptr, window):
    """Bits of the greatest gap that min_p admits; what is infinitely far is never drawn."""
    return tl.minimum(tl.load(max_gap_ptr + window).to(tl.int32, bitcast=True), _LAST_FINITE)


@triton.jit
def near(groups_ptr, row, parts, peak, temperature, rank, BLOCK: tl.constexpr):
    """Bits of a gap that at least `rank` lanes have tokens within, if there are so many lanes."""
    lane = tl.arange(0, BLOCK)
    inside = lane < parts * _LANES
    z = tl.load(groups_ptr + row * parts * _LANES + lane, mask=inside, other=float("-inf"))
    bits = tl.where(inside, gap_bits(z, peak, temperature), _BEYOND)
    found = rank * 0
    for i in range(20):  # the other 11 bits would make hardly a difference
        candidate = found | (1 << (30 - i))
        few = tl.sum((bits < candidate).to(tl.int32), axis=0) < rank
        found = tl.where(few, candidate, found)
    return found | 0x7FF


@triton.jit
def _gather_part(
    row_ptr, keys_ptr, listed_ptr, part, parts, V, peak, temperature, near_bits, max_gap, weighs,
    id_bits, CAPACITY: tl.constexpr,
):  # fmt: skip
    """List the candidates of a part; the mass of what min_p admits of it, if that is wanted."""
    mass = tl.zeros((), tl.int64)
    for first in range(0, V, parts * _TILE):
        ids = ids_of(first, part, parts)
        z = tl.load(row_ptr + ids, mask=ids < V, other=float("-inf"))
        bits = tl.where(ids < V, gap_bits(z, peak, temperature), _BEYOND)
        if weighs:
            mass += tl.sum(tl.where(bits <= max_gap, mass_of(bits), 0), axis=0)
        hit = (bits <= near_bits).to(tl.int32)
        count = tl.sum(hit, axis=0)
        if count > 0:
            place = tl.atomic_add(listed_ptr, count, sem="relaxed") + tl.cumsum(hit, axis=0) - 1
            mask = (hit > 0) & (place < CAPACITY)
            tl.store(keys_ptr + place, key_of(bits, ids, id_bits), mask=mask)
    return mass


@DependentKernel
@triton.jit
def _gather_kernel(
    z_ptr,  # f32[N, V]
    peak_ptr, value_ptr, window_ptr,  # f32[N], f32[N, parts], i32[N]
    temperature_ptr, max_gap_ptr, top_k_ptr, top_p_ptr,  # [V]
    counts_ptr, restricted_ptr, near_ptr, listed_ptr, keys_ptr, masses_ptr,  # see Lists
    V, parts, id_bits,
    CAPACITY: tl.constexpr,
):  # fmt: skip
    wait_for_earlier_kernels()
    items = tl.load(counts_ptr) * parts
    for item in range(tl.program_id(0), items, tl.num_programs(0)):
        row, part = tl.load(restricted_ptr + item // parts).to(tl.int64), item % parts
        window, peak = tl.load(window_ptr + row), tl.load(peak_ptr + row)
        temperature, near_bits = tl.load(temperature_ptr + window), tl.load(near_ptr + row)
        weighs = tl.load(top_p_ptr + window) < float("inf")
        weighs = weighs & (tl.load(top_k_ptr + window) >= V)
        nearest = gap_bits(tl.load(value_ptr + row * parts + part), peak, temperature)
        if weighs | (nearest <= near_bits):
            mass = _gather_part(
                z_ptr + row * V, keys_ptr + row * CAPACITY, listed_ptr + row, part, parts, V,
                peak, temperature, near_bits, last_gap(max_gap_ptr, window), weighs,
                id_bits, CAPACITY,
            )  # fmt: skip
            tl.store(masses_ptr + row * parts + part, mass)


@DependentKernel
@triton.jit
def _settle_kernel(
    z_ptr,  # f32[N, V]
    peak_ptr, window_ptr, length_ptr,  # f32[N], i32[N]
    temperature_ptr, seed_low_ptr, seed_high_ptr, max_gap_ptr, top_k_ptr, top_p_ptr,  # [V]
    counts_ptr, restricted_ptr, whole_ptr, limit_ptr, near_ptr, listed_ptr, keys_ptr, masses_ptr,
    value_ptr, id_ptr,  # f32[N, parts], i32[N, parts]
    V, parts, id_bits,
    CAPACITY: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    wait_for_earlier_kernels()
    if tl.program_id(0) < tl.load(counts_ptr):
        row = tl.load(restricted_ptr + tl.program_id(0)).to(tl.int64)
        window, peak = tl.load(window_ptr + row), tl.load(peak_ptr + row)
        t, row_ptr = tl.load(temperature_ptr + window), z_ptr + row * V
        top_k, top_p = tl.load(top_k_ptr + window), tl.load(top_p_ptr + window)
        max_gap, listed = last_gap(max_gap_ptr, window), tl.load(listed_ptr + row)
        bound = ((max_gap.to(tl.int64) + 1) << id_bits) - 1

        place, part = tl.arange(0, CAPACITY), tl.arange(0, PARTS)
        keys = tl.load(keys_ptr + row * CAPACITY + place, mask=place < listed, other=_NEVER)
        bits = (keys >> id_bits).to(tl.int32)
        masses = tl.where(keys <= bound, mass_of(tl.where(place < listed, bits, _LAST_FINITE)), 0)
        enough = (top_k < V) & (tl.sum((keys <= bound).to(tl.int32), axis=0) >= top_k)
        total = bound * 0
        if (top_p < float("inf")) & (top_k >= V):
            at = masses_ptr + row * parts + part
            total = tl.sum(tl.load(at, mask=part < parts, other=0), axis=0)
            enough = tl.sum(masses, axis=0) >= mass_wanted(top_p, total)
        complete = max_gap <= tl.load(near_ptr + row)
        if (listed <= CAPACITY) & (complete | enough):
            limit = limit_of(
                keys, masses, row_ptr, V, peak, t, id_bits, bound, top_k, top_p, total,
                True, BLOCK,
            )  # fmt: skip
            k0, k1 = row_key(
                tl.load(seed_low_ptr + window), tl.load(seed_high_ptr + window),
                tl.load(length_ptr + row),
            )  # fmt: skip
            ids = (keys & (((bound * 0 + 1) << id_bits) - 1)).to(tl.int32)
            score = -bits.to(tl.float32, bitcast=True) + gumbel(ids, k0, k1)
            best, best_id = best_of(tl.where(keys <= limit, score, float("-inf")), ids)
            at, mask = row * parts + part, part < parts
            tl.store(value_ptr + at, tl.where(part == 0, best, float("-inf")), mask=mask)
            tl.store(id_ptr + at, tl.where(part == 0, best_id, _BEYOND), mask=mask)
        else:
            limit = limit_of(
                keys, masses, row_ptr, V, peak, t, id_bits, bound, top_k, top_p, total,
                False, BLOCK,
            )  # fmt: skip
            append(whole_ptr, counts_ptr + 1, row)
        tl.store(limit_ptr + row, limit)


def draw_restricted(
    z: Tensor, peak: Tensor, window: Tensor, length: Tensor, params: DrawParams, lists: Lists,
    value: Tensor, ids: Tensor,
) -> None:  # fmt: skip
    """Draw for the restricted rows of z f32[N, V], or find the limit of what is drawn from them.

    value f32[N, parts] and ids i32[N, parts] hold the best token of each part, and afterwards, of
    rows that are settled, the drawn one.
    """
    (rows, vocab), parts = z.shape, value.shape[1]
    id_bits = id_bits_of(vocab)
    restricted = lists.near, lists.listed, lists.keys, lists.masses
    _gather_kernel[(min(rows * parts, PROGRAMS),)](
        z, peak, value, window, params.temperature, params.max_gap, params.top_k, params.top_p,
        lists.counts, lists.restricted, *restricted, vocab, parts, id_bits,
        CAPACITY=lists.keys.shape[1], num_warps=PART_WARPS, maxnreg=128, enable_fp_fusion=False,
    )  # fmt: skip
    _settle_kernel[(rows,)](
        z, peak, window, length, params.temperature, params.seed_low, params.seed_high,
        params.max_gap, params.top_k, params.top_p,
        lists.counts, lists.restricted, lists.whole, lists.limit, *restricted, value, ids,
        vocab, parts, id_bits, CAPACITY=lists.keys.shape[1],
        PARTS=triton.next_power_of_2(parts), BLOCK=ROW_BLOCK,
        num_warps=_ROW_WARPS, enable_fp_fusion=False,
    )  # fmt: skip


def id_bits_of(vocab: int) -> int:
    """How many bits ids take in a key."""
    return max(1, (vocab - 1).bit_length())
