"""From logits to one token per position.

Rows are long and few, so a pass over the vocabulary is shared out among programs, each of which
leaves a partial result. Order and rounding are those of the reference: noise bit for bit, one
division per token, the lowest id of equals.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from surestep_kernels.choose import SATURATED, Chosen, DrawParams, RowStatus

from .gumbel import gumbel, row_key
from .nucleus import find_limits, is_finite, kept

_BLOCK = 1024  # tokens looked at together
_MAX_PARTS = 64  # programs that share a row
_OK: tl.constexpr = tl.constexpr(int(RowStatus.OK))
_NON_FINITE: tl.constexpr = tl.constexpr(int(RowStatus.NON_FINITE))
_NO_CANDIDATE: tl.constexpr = tl.constexpr(int(RowStatus.NO_CANDIDATE))
_SHAPING_OVERFLOW: tl.constexpr = tl.constexpr(int(RowStatus.SHAPING_OVERFLOW))
_SATURATED: tl.constexpr = tl.constexpr(SATURATED)
_NO_ID: tl.constexpr = tl.constexpr(2147483647)


@triton.jit
def _store_best(values, ids, value_ptr, id_ptr, at):
    """The greatest of values [B] and its lowest id; NaN if there is any."""
    top = tl.max(tl.where(values == values, values, float("-inf")), axis=0)
    tl.store(id_ptr + at, tl.min(tl.where(values == top, ids, _NO_ID), axis=0))
    nan = tl.max((values != values).to(tl.int32), axis=0) > 0
    tl.store(value_ptr + at, tl.where(nan, float("nan"), top))


@triton.jit
def _better(best, best_id, value, ids):
    """Element by element the greater value; NaN is kept, and ids that come first among equals."""
    wins = ((value > best) | (value != value)) & (best == best)
    return tl.where(wins, value, best), tl.where(wins, ids, best_id)


@triton.jit
def _peak_kernel(
    z_ptr,  # f32[N, V]
    value_ptr, id_ptr,  # f32[N, parts], i32[N, parts]
    V, span, parts,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    best = tl.full((BLOCK,), float("-inf"), tl.float32)
    best_id = tl.full((BLOCK,), _NO_ID, tl.int32)
    for first in range(part * span, tl.minimum((part + 1) * span, V), BLOCK):
        ids = first + tl.arange(0, BLOCK)
        z = tl.load(z_ptr + row * V + ids, mask=ids < V, other=float("-inf"))
        best, best_id = _better(best, best_id, z, ids)
    _store_best(best, best_id, value_ptr, id_ptr, row * parts + part)


@triton.jit
def _best_of_parts(value_ptr, id_ptr, row, parts, BLOCK: tl.constexpr):
    """The best of a row: value, NaN if there is any, and id."""
    part = tl.arange(0, BLOCK)
    at, mask = row * parts + part, part < parts
    value = tl.load(value_ptr + at, mask=mask, other=float("-inf"))
    ids = tl.load(id_ptr + at, mask=mask, other=_NO_ID)
    top = tl.max(tl.where(value == value, value, float("-inf")), axis=0)
    best_id = tl.min(tl.where(value == top, ids, _NO_ID), axis=0)
    nan = tl.max((value != value).to(tl.int32), axis=0) > 0
    return tl.where(nan, float("nan"), top), best_id


@triton.jit
def _collect_kernel(
    value_ptr, id_ptr,  # f32[N, parts], i32[N, parts]
    peak_ptr, greedy_ptr,  # f32[N], i32[N]
    parts,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    value, best_id = _best_of_parts(value_ptr, id_ptr, row, parts, BLOCK)
    tl.store(peak_ptr + row, value)
    tl.store(greedy_ptr + row, best_id)


@triton.jit
def _draw_kernel(
    z_ptr,  # f32[N, V]
    peak_ptr,  # f32[N]
    window_ptr, length_ptr,  # i32[N]
    temperature_ptr, seed_low_ptr, seed_high_ptr,  # [V]
    limit_ptr,  # i32[N, 2]; CUTS only
    value_ptr, id_ptr,  # f32[N, parts], i32[N, parts]
    V, span, parts,
    CUTS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    window, peak = tl.load(window_ptr + row), tl.load(peak_ptr + row)
    temperature = tl.load(temperature_ptr + window)
    if (temperature > 0) & is_finite(peak):
        k0, k1 = row_key(
            tl.load(seed_low_ptr + window), tl.load(seed_high_ptr + window),
            tl.load(length_ptr + row),
        )  # fmt: skip
        best = tl.full((BLOCK,), float("-inf"), tl.float32)
        best_id = tl.full((BLOCK,), _NO_ID, tl.int32)
        for first in range(part * span, tl.minimum((part + 1) * span, V), BLOCK):
            ids = first + tl.arange(0, BLOCK)
            z = tl.load(z_ptr + row * V + ids, mask=ids < V, other=float("-inf"))
            gap = tl.div_rn(peak - z, tl.full((BLOCK,), 0.0, tl.float32) + temperature)
            score = -gap + gumbel(ids, k0, k1)
            if CUTS:
                score = tl.where(kept(gap, ids, limit_ptr + 2 * row), score, float("-inf"))
            best, best_id = _better(best, best_id, tl.where(ids < V, score, float("-inf")), ids)
        _store_best(best, best_id, value_ptr, id_ptr, row * parts + part)


@triton.jit
def _finish_kernel(
    peak_ptr, greedy_ptr,  # f32[N], i32[N]
    value_ptr, drawn_ptr,  # f32[N, parts], i32[N, parts]; DRAWS only
    window_ptr, temperature_ptr,  # i32[N], f32[V]
    ids_ptr, status_ptr,  # i32[N]
    parts,
    DRAWS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    peak, chosen = tl.load(peak_ptr + row), tl.load(greedy_ptr + row)
    if DRAWS:  # noqa: SIM102  # known when the kernel is compiled; the other one is not
        if tl.load(temperature_ptr + tl.load(window_ptr + row)) > 0:
            _, chosen = _best_of_parts(value_ptr, drawn_ptr, row, parts, BLOCK)
    status = tl.where(peak == float("-inf"), _NO_CANDIDATE, _NON_FINITE)
    status = tl.where(is_finite(peak), _OK, status)
    status = tl.where(peak == _SATURATED, _SHAPING_OVERFLOW, status)
    tl.store(ids_ptr + row, tl.where(status == _OK, chosen, 0))
    tl.store(status_ptr + row, status)


def choose(
    z: Tensor,
    window: Tensor,
    length: Tensor,
    params: DrawParams,
    *,
    random: bool,
    truncated: bool,
) -> Chosen:
    """See choose_reference."""
    assert z.dtype is torch.float32
    assert z.is_contiguous()
    rows, vocab = z.shape
    parts = min(triton.cdiv(vocab, _BLOCK), _MAX_PARTS)
    span = triton.cdiv(triton.cdiv(vocab, parts), _BLOCK) * _BLOCK
    value, peak = z.new_empty(rows, parts), z.new_empty(rows)
    part_ids, greedy, ids, status = (
        torch.empty(shape, dtype=torch.int32, device=z.device)
        for shape in ((rows, parts), rows, rows, rows)
    )
    block = triton.next_power_of_2(parts)
    _peak_kernel[rows, parts](z, value, part_ids, vocab, span, parts, BLOCK=_BLOCK)
    _collect_kernel[(rows,)](value, part_ids, peak, greedy, parts, BLOCK=block)
    if random:
        limits = find_limits(z, peak, window, params) if truncated else part_ids
        _draw_kernel[rows, parts](
            z, peak, window, length, params.temperature, params.seed_low, params.seed_high,
            limits, value, part_ids, vocab, span, parts, CUTS=truncated, BLOCK=_BLOCK,
        )  # fmt: skip
    _finish_kernel[(rows,)](
        peak, greedy, value, part_ids, window, params.temperature, ids, status, parts,
        DRAWS=random, BLOCK=block,
    )  # fmt: skip
    return Chosen(ids, status)
