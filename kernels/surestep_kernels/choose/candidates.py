"""Candidates of rows that restrict what they draw from: the groups that have some, and their lists.

nucleus.py describes what they are for.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from surestep_kernels.columns.gpu.dependent_launch import DependentKernel, wait_for_earlier_kernels

from .reference import DrawParams
from .rest import weight_of, weight_scale
from .vocab import GROUPS, LANES, LINES, RUN, RUNS, gap_bits, id_bits_of, ids_of_group, key_of

CAPACITY = 4096  # capacity of a row's list
WANTED = 2048  # at most this many groups whose best token is to be a candidate
FEWEST = 64  # and at least this many: a program gathers as many at once
PROGRAMS = 1056  # that take parts of rows in turn: 8 per multiprocessor of 132
PART_WARPS = 8  # of these: 8 tokens of a tile for each thread, whose keys are i64
_TILE: tl.constexpr = tl.constexpr(LANES * LINES)
_GROUPS: tl.constexpr = tl.constexpr(GROUPS)
_PLACES: tl.constexpr = tl.constexpr(RUN * RUNS)
_FEWEST: tl.constexpr = tl.constexpr(FEWEST)
_LAST_FINITE: tl.constexpr = tl.constexpr(0x7F7FFFFF)
_BEYOND: tl.constexpr = tl.constexpr(0x7FFFFFFF)


class CandidateLists(NamedTuple):
    """Kind of draw of each row, and its candidates; filled by the kernels of a step."""

    counts: Tensor  # i32[2] rows that restrict what they draw from; rows to be drawn whole
    restricted: Tensor  # i32[N]
    whole: Tensor  # i32[N]
    limit: Tensor  # i64[N] key of the last token that may be drawn
    near: Tensor  # i32[N] bits of the gap up to which tokens are candidates
    listed: Tensor  # i32[N] number of candidates, in the list or not
    keys: Tensor  # i64[N, CAPACITY]
    chosen: Tensor  # i32[N] how many groups have candidates
    groups: Tensor  # i32[N, parts * GROUPS] which ones
    rest: Tensor  # f32[N] weight of the other groups
    rests: Tensor  # f32[N, parts] weight of the other tokens in groups with candidates

    @classmethod
    def for_rows(
        cls, rows: int, parts: int, *, truncated: bool, device: torch.device
    ) -> CandidateLists:
        """Return uninitialised lists."""

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
            chosen=empty(torch.int32, some),
            groups=empty(torch.int32, some, parts * GROUPS),
            rest=empty(torch.float32, some),
            rests=empty(torch.float32, some, parts),
        )


@triton.jit
def last_gap(max_gap_ptr, window):
    """Return the bits of the greatest gap that min_p admits; infinite gaps are never drawn."""
    return tl.minimum(tl.load(max_gap_ptr + window).to(tl.int32, bitcast=True), _LAST_FINITE)


@triton.jit
def choose_groups(
    best_ptr,
    weight_ptr,
    count,
    peak,
    temperature,
    max_gap,
    top_k,
    top_p,
    V,
    wanted,
    near_ptr,
    chosen_ptr,
    groups_ptr,
    rest_ptr,
    BLOCK: tl.constexpr,
):
    """Choose how far candidates go in a row with `count` groups, and the groups that have some."""
    group = tl.arange(0, BLOCK)
    inside = group < count
    z = tl.load(best_ptr + group, mask=inside, other=float("-inf"))
    bits = tl.where(inside, gap_bits(z, peak, temperature), _BEYOND)
    weighs = (top_p < float("inf")) & (top_k >= V)
    least, target = tl.minimum(tl.maximum(top_k, _FEWEST), wanted), 0.0
    weight, weights = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
    if weighs:
        of_group = tl.load(weight_ptr + group, mask=inside, other=0.0)
        weight = tl.exp2((z - peak) * weight_scale(temperature))
        weights = weight * of_group
        least = tl.minimum(_FEWEST, wanted)
        # More than needed, so that little is left to be estimated. What min_p keeps of the tokens
        # is not known yet: where it restricts too, the list must contain all of them.
        share = tl.where(max_gap < _LAST_FINITE, float("inf"), top_p * 0.25 + 0.75)
        target = tl.sum(weights) * share
    found = least * 0
    for i in range(20):  # the other 11 bits would hardly make a difference
        candidate = found | (1 << (30 - i))
        closer = bits < candidate
        groups = tl.sum(closer.to(tl.int32))
        light = tl.sum(tl.where(closer, weight, 0.0)) < target
        few = (groups < least) | (light & (groups < wanted))
        found = tl.where(few, candidate, found)
    near_bits = tl.minimum(found | 0x7FF, max_gap)
    hit = bits <= near_bits
    at = tl.cumsum(hit.to(tl.int32), axis=0) - 1
    tl.store(groups_ptr + at, group, mask=hit)
    tl.store(near_ptr, near_bits)
    tl.store(chosen_ptr, tl.sum(hit.to(tl.int32)))
    rest = tl.sum(tl.where(hit, 0.0, weights))
    tl.store(rest_ptr, tl.where(near_bits < max_gap, rest, 0.0))


@triton.jit
def _gather_part(
    row_ptr,
    keys_ptr,
    listed_ptr,
    groups_ptr,
    part,
    chosen,
    parts,
    V,
    peak,
    temperature,
    near_bits,
    max_gap,
    id_bits,
    CAPACITY: tl.constexpr,
):
    """List the candidates of GROUPS of the chosen groups; return the weight of their others."""
    weight = tl.zeros((), tl.float32)
    at, place = part * _GROUPS + tl.arange(0, _GROUPS), tl.arange(0, _PLACES)
    group = tl.load(groups_ptr + at, mask=at < chosen, other=0)
    for first in range(0, V, parts * _TILE):
        ids = ids_of_group(first, group[:, None], place[None, :], parts)
        inside = (ids < V) & (at < chosen)[:, None]
        z = tl.load(row_ptr + ids, mask=inside, other=float("-inf"))
        bits = tl.where(inside, gap_bits(z, peak, temperature), _BEYOND)
        near = bits <= near_bits
        weight += tl.sum(tl.where(near | (bits > max_gap), 0.0, weight_of(bits)))
        hit = near.to(tl.int32)
        hits = tl.sum(hit, axis=1)
        count = tl.sum(hits, axis=0)
        if count > 0:
            begin = tl.atomic_add(listed_ptr, count, sem="relaxed") + tl.cumsum(hits, axis=0) - hits
            to = begin[:, None] + tl.cumsum(hit, axis=1) - 1
            mask = near & (to < CAPACITY)
            tl.store(keys_ptr + to, key_of(bits, ids, id_bits), mask=mask)
    return weight


@DependentKernel
@triton.jit
def _gather_kernel(
    z_ptr,  # f32[N, V]
    peak_ptr,  # f32[N]
    window_ptr,  # i32[N]
    temperature_ptr,  # and the other parameters: [V]
    max_gap_ptr,
    counts_ptr,  # and the other lists: see CandidateLists
    restricted_ptr,
    near_ptr,
    listed_ptr,
    keys_ptr,
    chosen_ptr,
    groups_ptr,
    rests_ptr,
    V,
    parts,
    id_bits,
    CAPACITY: tl.constexpr,
):
    wait_for_earlier_kernels()
    items = tl.load(counts_ptr) * parts
    for item in range(tl.program_id(0), items, tl.num_programs(0)):
        row, part = tl.load(restricted_ptr + item // parts).to(tl.int64), item % parts
        chosen = tl.load(chosen_ptr + row)
        if part * _GROUPS < chosen:
            window = tl.load(window_ptr + row)
            weight = _gather_part(
                z_ptr + row * V,
                keys_ptr + row * CAPACITY,
                listed_ptr + row,
                groups_ptr + row * parts * _GROUPS,
                part,
                chosen,
                parts,
                V,
                tl.load(peak_ptr + row),
                tl.load(temperature_ptr + window),
                tl.load(near_ptr + row),
                last_gap(max_gap_ptr, window),
                id_bits,
                CAPACITY,
            )
            tl.store(rests_ptr + row * parts + part, weight)


def gather(
    z: Tensor, peak: Tensor, window: Tensor, params: DrawParams, lists: CandidateLists
) -> None:
    """List the candidates of the restricted rows of z f32[N, V], whose groups are chosen."""
    (rows, vocab), parts = z.shape, lists.rests.shape[1]
    _gather_kernel[(min(rows * parts, PROGRAMS),)](
        z,
        peak,
        window,
        params.temperature,
        params.max_gap,
        lists.counts,
        lists.restricted,
        lists.near,
        lists.listed,
        lists.keys,
        lists.chosen,
        lists.groups,
        lists.rests,
        vocab,
        parts,
        id_bits_of(vocab),
        CAPACITY=lists.keys.shape[1],
        num_warps=PART_WARPS,
        enable_fp_fusion=False,
    )
