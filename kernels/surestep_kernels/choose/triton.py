"""From logits to one token per position.

Rows are long and few, so a pass over the vocabulary is divided among programs, each of which leaves
a partial result. Order and rounding are those of the reference: noise bit for bit, one division per
token, the lowest id among equals.

    peak     all rows        their maxima, by part, and by group where rows are restricted
    collect  all rows        which rows draw, and how; groups with candidates of restricted ones
    gather   restricted ones, see candidates.py
    settle   restricted ones
    draw     the other rows that draw, and restricted ones that no list could settle
    finish   all rows

Greedy rows are in no list, and cost nothing after `collect`.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from surestep_kernels.columns.gpu.dependent_launch import DependentKernel, wait_for_earlier_kernels

from . import candidates
from .candidates import CandidateLists, choose_groups, last_gap
from .nucleus import draw_restricted
from .reference import SATURATED, Chosen, DrawParams, RowStatus
from .rest import weigh, weighs_all, weight_scale
from .triton_gumbel import gumbel, row_key
from .vocab import (
    GROUPS,
    LANES,
    LINES,
    RUN,
    RUNS,
    append,
    best_of,
    best_of_parts,
    better,
    gap_bits,
    id_bits_of,
    ids_of,
    ids_of_group,
    is_finite,
    key_of,
    parts_of,
)

_OK: tl.constexpr = tl.constexpr(int(RowStatus.OK))
_NON_FINITE: tl.constexpr = tl.constexpr(int(RowStatus.NON_FINITE))
_NO_CANDIDATE: tl.constexpr = tl.constexpr(int(RowStatus.NO_CANDIDATE))
_SHAPING_OVERFLOW: tl.constexpr = tl.constexpr(int(RowStatus.SHAPING_OVERFLOW))
_SATURATED: tl.constexpr = tl.constexpr(SATURATED)
_NO_ID: tl.constexpr = tl.constexpr(2147483647)
_NO_LIMIT: tl.constexpr = tl.constexpr(9223372036854775807)
_GROUPS: tl.constexpr = tl.constexpr(GROUPS)
_PLACES: tl.constexpr = tl.constexpr(RUN * RUNS)
_TILE: tl.constexpr = tl.constexpr(LANES * LINES)


@DependentKernel
@triton.jit
def _peak_kernel(
    z_ptr,  # f32[N, V]
    window_ptr,  # i32[N]
    temperature_ptr,  # and the other parameters: [V]
    top_k_ptr,
    top_p_ptr,
    value_ptr,  # f32[N, parts]
    id_ptr,  # i32[N, parts]
    best_ptr,  # f32[N, parts * GROUPS]; CUTS only
    weight_ptr,  # f32[N, parts * GROUPS]; CUTS only
    counts_ptr,  # i32[2]
    V,
    parts,
    CUTS: tl.constexpr,
):
    wait_for_earlier_kernels()
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    value, lowest = tl.full((), float("-inf"), tl.float32), tl.full((), _NO_ID, tl.int32)
    group, place = part * _GROUPS + tl.arange(0, _GROUPS), tl.arange(0, _PLACES)
    best = tl.full((_GROUPS,), float("-inf"), tl.float32)
    weight = tl.zeros((_GROUPS,), tl.float32)
    if CUTS:
        window = tl.load(window_ptr + row)
        temperature = tl.load(temperature_ptr + window)
        weighs = (temperature > 0) & weighs_all(top_k_ptr, top_p_ptr, window, V)
    for first in range(0, V, parts * _TILE):
        ids = ids_of_group(first, group[:, None], place[None, :], parts)
        z = tl.load(z_ptr + row * V + ids, mask=ids < V, other=float("-inf"))
        tile_value, tile_id = best_of(z, ids)
        value, lowest = better(value, lowest, tile_value, tile_id)
        if CUTS:
            greatest = tl.maximum(best, tl.max(z, axis=1))
            if weighs:
                weight = weigh(weight, best, greatest, z, weight_scale(temperature))
            best = greatest
    if CUTS:
        tl.store(best_ptr + row * parts * _GROUPS + group, best)
        if weighs:
            tl.store(weight_ptr + row * parts * _GROUPS + group, weight)
    tl.store(value_ptr + row * parts + part, value)
    tl.store(id_ptr + row * parts + part, lowest)
    if (row == 0) & (part == 0):
        tl.store(counts_ptr + tl.arange(0, 2), tl.zeros((2,), tl.int32))


@DependentKernel
@triton.jit
def _collect_kernel(
    value_ptr,  # f32[N, parts]
    id_ptr,  # i32[N, parts]
    best_ptr,  # f32[N, parts * GROUPS]; CUTS only
    weight_ptr,  # f32[N, parts * GROUPS]; CUTS only
    peak_ptr,  # f32[N]
    greedy_ptr,  # i32[N]
    window_ptr,  # i32[N]
    temperature_ptr,  # and the other parameters: [V]
    max_gap_ptr,
    top_k_ptr,
    top_p_ptr,
    counts_ptr,  # and the other lists: see CandidateLists
    restricted_ptr,
    whole_ptr,
    limit_ptr,
    near_ptr,
    listed_ptr,
    chosen_ptr,
    groups_ptr,
    rest_ptr,
    V,
    parts,
    wanted,
    DRAWS: tl.constexpr,
    CUTS: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUPS: tl.constexpr,
):
    wait_for_earlier_kernels()
    row = tl.program_id(0).to(tl.int64)
    value, best_id = best_of_parts(value_ptr, id_ptr, row, parts, BLOCK)
    peak = value + 0.0  # turns -0 into 0
    tl.store(peak_ptr + row, peak)
    tl.store(greedy_ptr + row, best_id)
    if DRAWS:
        window = tl.load(window_ptr + row)
        temperature = tl.load(temperature_ptr + window)
        if (temperature > 0) & is_finite(peak):
            cuts = False
            if CUTS:
                top_k, top_p = tl.load(top_k_ptr + window), tl.load(top_p_ptr + window)
                cuts = (top_k < V) | (top_p < float("inf"))
                cuts = cuts | (tl.load(max_gap_ptr + window) < float("inf"))
                if cuts:
                    at = row * parts * _GROUPS
                    choose_groups(
                        best_ptr + at,
                        weight_ptr + at,
                        parts * _GROUPS,
                        peak,
                        temperature,
                        last_gap(max_gap_ptr, window),
                        top_k,
                        top_p,
                        V,
                        wanted,
                        near_ptr + row,
                        chosen_ptr + row,
                        groups_ptr + at,
                        rest_ptr + row,
                        GROUPS,
                    )
                    tl.store(listed_ptr + row, 0)
                    append(restricted_ptr, counts_ptr, row)
            if not cuts:
                tl.store(limit_ptr + row, _NO_LIMIT)
                append(whole_ptr, counts_ptr + 1, row)


@DependentKernel
@triton.jit
def _draw_kernel(
    z_ptr,  # f32[N, V]
    peak_ptr,  # f32[N]
    window_ptr,  # i32[N]
    length_ptr,  # i32[N]
    temperature_ptr,  # and the other parameters: [V]
    seed_low_ptr,
    seed_high_ptr,
    counts_ptr,  # and the other lists: see CandidateLists
    whole_ptr,
    limit_ptr,
    value_ptr,  # f32[N, parts]
    id_ptr,  # i32[N, parts]
    V,
    parts,
    id_bits,
):
    wait_for_earlier_kernels()
    items = tl.load(counts_ptr + 1) * parts
    for item in range(tl.program_id(0), items, tl.num_programs(0)):
        row, part = tl.load(whole_ptr + item // parts).to(tl.int64), item % parts
        window, peak = tl.load(window_ptr + row), tl.load(peak_ptr + row)
        temperature, limit = tl.load(temperature_ptr + window), tl.load(limit_ptr + row)
        low, high = tl.load(seed_low_ptr + window), tl.load(seed_high_ptr + window)
        k0, k1 = row_key(low, high, tl.load(length_ptr + row))
        best = tl.full((_TILE,), float("-inf"), tl.float32)
        best_id = tl.full((_TILE,), _NO_ID, tl.int32)
        for first in range(0, V, parts * _TILE):
            ids = ids_of(first, part, parts)
            z = tl.load(z_ptr + row * V + ids, mask=ids < V, other=float("-inf"))
            bits = gap_bits(z, peak, temperature)
            score = -bits.to(tl.float32, bitcast=True) + gumbel(ids, k0, k1)
            may = (ids < V) & (key_of(bits, ids, id_bits) <= limit)
            best, best_id = better(best, best_id, tl.where(may, score, float("-inf")), ids)
        value, lowest = best_of(best, best_id)
        tl.store(value_ptr + row * parts + part, value)
        tl.store(id_ptr + row * parts + part, lowest)


@DependentKernel
@triton.jit
def _finish_kernel(
    peak_ptr,  # f32[N]
    greedy_ptr,  # i32[N]
    value_ptr,  # f32[N, parts]; DRAWS only
    drawn_ptr,  # i32[N, parts]; DRAWS only
    window_ptr,  # i32[N]
    temperature_ptr,  # f32[V]
    ids_ptr,  # i32[N]
    status_ptr,  # i32[N]
    parts,
    DRAWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    wait_for_earlier_kernels()
    row = tl.program_id(0).to(tl.int64)
    peak, chosen = tl.load(peak_ptr + row), tl.load(greedy_ptr + row)
    if DRAWS:  # noqa: SIM102  # known when the kernel is compiled; the other one is not
        if tl.load(temperature_ptr + tl.load(window_ptr + row)) > 0:
            _, chosen = best_of_parts(value_ptr, drawn_ptr, row, parts, BLOCK)
    status = tl.where(peak == float("-inf"), _NO_CANDIDATE, _NON_FINITE)
    status = tl.where(is_finite(peak), _OK, status)
    status = tl.where(peak == _SATURATED, _SHAPING_OVERFLOW, status)
    tl.store(ids_ptr + row, tl.where(status == _OK, chosen, 0))
    tl.store(status_ptr + row, status)


class _Found(NamedTuple):
    """Results of the passes over N rows, in parts of the vocabulary and in all of it."""

    value: Tensor  # f32[N, parts] maxima, then scores of the tokens drawn
    ids: Tensor  # i32[N, parts] whose they are
    best: Tensor  # f32[N, parts * GROUPS] maxima of groups, and the weights of these
    weight: Tensor
    peak: Tensor  # f32[N]
    greedy: Tensor  # i32[N] id of the peak

    @classmethod
    def empty(cls, z: Tensor, parts: int, *, cuts: bool) -> _Found:
        rows, words = len(z), partial(torch.empty, dtype=torch.int32, device=z.device)
        best, weight = z.new_empty(2, rows if cuts else 0, parts * GROUPS).unbind()
        ids, greedy = words(rows, parts), words(rows)
        return cls(z.new_empty(rows, parts), ids, best, weight, z.new_empty(rows), greedy)


def choose(
    z: Tensor,
    window: Tensor,
    length: Tensor,
    params: DrawParams,
    *,
    random: bool,
    truncated: bool,
) -> Chosen:
    assert z.dtype is torch.float32
    assert z.is_contiguous()
    rows, vocab = z.shape
    parts, cuts = parts_of(vocab), random and truncated
    found = _Found.empty(z, parts, cuts=cuts)
    lists = CandidateLists.for_rows(rows, parts, truncated=cuts, device=z.device)
    _peak_kernel[rows, parts](
        z,
        window,
        params.temperature,
        params.top_k,
        params.top_p,
        found.value,
        found.ids,
        found.best,
        found.weight,
        lists.counts,
        vocab,
        parts,
        CUTS=cuts,
    )
    _collect(window, params, found, lists, vocab, random=random, cuts=cuts)
    if cuts:
        draw_restricted(z, found.peak, window, length, params, lists, found.value, found.ids)
    if random:
        _draw(z, window, length, params, found, lists)
    ids, status = (torch.empty(rows, dtype=torch.int32, device=z.device) for _ in range(2))
    _finish_kernel[(rows,)](
        found.peak,
        found.greedy,
        found.value,
        found.ids,
        window,
        params.temperature,
        ids,
        status,
        parts,
        DRAWS=random,
        BLOCK=triton.next_power_of_2(parts),
    )
    return Chosen(ids, status)


def _collect(
    window: Tensor,
    params: DrawParams,
    found: _Found,
    lists: CandidateLists,
    vocab: int,
    *,
    random: bool,
    cuts: bool,
) -> None:
    """Find the peaks of all rows, and how each is drawn from."""
    rows, parts = found.value.shape
    block = triton.next_power_of_2(parts)
    _collect_kernel[(rows,)](
        found.value,
        found.ids,
        found.best,
        found.weight,
        found.peak,
        found.greedy,
        window,
        params.temperature,
        params.max_gap,
        params.top_k,
        params.top_p,
        lists.counts,
        lists.restricted,
        lists.whole,
        lists.limit,
        lists.near,
        lists.listed,
        lists.chosen,
        lists.groups,
        lists.rest,
        vocab,
        parts,
        candidates.WANTED,
        DRAWS=random,
        CUTS=cuts,
        BLOCK=block,
        GROUPS=block * GROUPS,
        num_warps=8 if cuts else 4,
    )


def _draw(
    z: Tensor,
    window: Tensor,
    length: Tensor,
    params: DrawParams,
    found: _Found,
    lists: CandidateLists,
) -> None:
    """Draw from the rows of z f32[N, V] that are not drawn from already."""
    (rows, vocab), parts = z.shape, found.value.shape[1]
    _draw_kernel[(min(rows * parts, candidates.PROGRAMS),)](
        z,
        found.peak,
        window,
        length,
        params.temperature,
        params.seed_low,
        params.seed_high,
        lists.counts,
        lists.whole,
        lists.limit,
        found.value,
        found.ids,
        vocab,
        parts,
        id_bits_of(vocab),
        num_warps=candidates.PART_WARPS,
        enable_fp_fusion=False,
    )
