"""Acceptance of drafts, and the advance of the slots, in Triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from surestep_kernels.choose import Chosen, RowStatus
from surestep_kernels.columns.gpu.dependent_launch import DependentKernel, wait_for_earlier_kernels
from surestep_kernels.slot_state import DraftIds, SlotState, StepRows

from .reference import Report, StopIds, report_width

_OK: tl.constexpr = tl.constexpr(int(RowStatus.OK))
_FACTS: tl.constexpr = tl.constexpr(len(Report._fields) - 1)


@triton.jit
def _is_stop(tokens, window, cu_ptr, ids_ptr):
    """Return which of tokens [K+1] are stop ids of the window; -1 is a row without one."""
    stop, has = tokens < 0, window >= 0
    begin = tl.load(cu_ptr + window, mask=has, other=0)
    end = tl.load(cu_ptr + window + 1, mask=has, other=0)
    for i in range(begin, end):
        stop |= tokens == tl.load(ids_ptr + i)
    return stop


@triton.jit
def _accept_window(
    row,
    window,
    n_drafts,
    K,
    draft_ids_ptr,
    chosen_ptr,
    status_ptr,
    cu_windows_ptr,
    cu_stops_ptr,
    stop_ids_ptr,
    BLOCK: tl.constexpr,
):
    """Return tokens [K+1] of a window, the emitted and accepted counts, and the first status."""
    w, column = tl.maximum(window, 0).to(tl.int64), tl.arange(0, BLOCK)
    has = window + tl.zeros_like(column) >= 0  # [K+1], all alike
    inside = has & (column <= n_drafts) & (column <= K)
    at = tl.load(cu_windows_ptr + w).to(tl.int64) + column
    tokens = tl.load(chosen_ptr + at, mask=inside, other=0)
    status = tl.load(status_ptr + at, mask=inside, other=0)
    drafted = has & (column < n_drafts) & (column < K)
    drafts = tl.load(draft_ids_ptr + row * K + column, mask=drafted, other=-1)
    equal, stop = drafted & (tokens == drafts), _is_stop(tokens, window, cu_stops_ptr, stop_ids_ptr)
    # A window ends after a choice that differs or stops, and before a bad one.
    bad = (inside & (status == _OK)) == 0
    ends = (equal & (stop == 0)) == 0
    first_bad = tl.min(tl.where(bad, column, BLOCK), axis=0)
    first_end = tl.min(tl.where(ends, column, BLOCK), axis=0)
    n_emitted = tl.minimum(first_bad, first_end + 1)
    last = tl.maximum(n_emitted - 1, 0)
    drafted_stop = (n_emitted > 0) & (tl.sum(tl.where(column == last, equal & stop, 0), axis=0) > 0)
    first_status = tl.sum(tl.where(column == 0, status, 0), axis=0)
    return (
        tokens,
        n_emitted,
        last + drafted_stop.to(tl.int32),
        tl.where(window >= 0, first_status, _OK),
    )


@DependentKernel
@triton.jit
def _commit_kernel(
    slot_ptr,  # i32[R]
    cu_rows_ptr,  # i32[R+1]
    advances_ptr,  # i32[R]
    catch_up_ptr,  # i32[R]
    window_ptr,  # i32[R]
    draft_ids_ptr,  # i32[R, K]
    counts_ptr,  # i32[R]
    chosen_ptr,  # i32[N]
    status_ptr,  # i32[N]
    cu_windows_ptr,  # i32[V+1]
    cu_stops_ptr,  # i32[V+1]
    stop_ids_ptr,  # i32[..]
    tokens_ptr,  # i32[S, W]
    committed_ptr,  # i32[S]
    known_ptr,  # i32[S]
    folded_ptr,  # i32[S]
    drafter_len_ptr,  # i32[S]
    report_ptr,  # i32[R, _FACTS + K + 1]
    S,
    W,
    K,
    BLOCK: tl.constexpr,
):
    wait_for_earlier_kernels()
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_ptr + row)
    slot = tl.where((slot >= 0) & (slot < S), slot, S - 1).to(tl.int64)
    n_drafts = tl.load(counts_ptr + row)
    real = slot < S - 1
    window = tl.where(real, tl.load(window_ptr + row), -1)
    tokens, n_emitted, n_accepted, status = _accept_window(
        row,
        window,
        n_drafts,
        K,
        draft_ids_ptr,
        chosen_ptr,
        status_ptr,
        cu_windows_ptr,
        cu_stops_ptr,
        stop_ids_ptr,
        BLOCK,
    )
    start, known = tl.load(committed_ptr + slot), tl.load(known_ptr + slot)
    advances = tl.where(real, tl.load(advances_ptr + row), 0)
    count = tl.load(cu_rows_ptr + row + 1) - tl.load(cu_rows_ptr + row)
    consumed = tl.where(status == _OK, tl.where(advances > 0, count, n_emitted), 0)
    folded = start + count * advances
    upto = tl.minimum(start, tl.load(drafter_len_ptr + slot) + tl.load(catch_up_ptr + row))
    column = tl.arange(0, BLOCK)
    place = known + column
    written = (column < n_emitted) & (place >= 0) & (place < W)
    tl.store(tokens_ptr + slot * W + place, tokens, mask=written)
    tl.store(committed_ptr + slot, start + consumed)
    tl.store(known_ptr + slot, known + n_emitted)
    tl.store(folded_ptr + slot, folded)
    tl.store(drafter_len_ptr + slot, upto)
    line = report_ptr + row * (_FACTS + K + 1)
    tl.store(line, start)
    tl.store(line + 1, n_drafts)
    tl.store(line + 2, status)
    tl.store(line + 3, n_accepted)
    tl.store(line + 4, n_emitted)
    tl.store(line + 5, folded)
    tl.store(line + 6, upto)
    tl.store(line + _FACTS + column, tokens, mask=column <= K)


def commit_step(
    rows: StepRows, drafts: DraftIds, chosen: Chosen, stops: StopIds, state: SlotState
) -> Tensor:
    num_rows, num_drafts = drafts.ids.shape
    lines, width = state.tokens.shape
    shape = num_rows, report_width(num_drafts)
    report = torch.empty(shape, dtype=torch.int32, device=rows.slot.device)
    if num_rows:
        _commit_kernel[(num_rows,)](
            rows.slot,
            rows.cu_rows,
            rows.advances,
            rows.catch_up,
            rows.window,
            drafts.ids,
            drafts.counts,
            chosen.ids,
            chosen.status,
            rows.cu_windows,
            stops.cu,
            stops.ids,
            state.tokens,
            state.committed,
            state.known,
            state.folded,
            state.drafter_len,
            report,
            lines,
            width,
            num_drafts,
            BLOCK=triton.next_power_of_2(num_drafts + 1),
        )
    return report
