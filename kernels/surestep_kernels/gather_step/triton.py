"""From slots and geometry to the inputs of one forward pass.

Three launches, each of which needs what the one before wrote: the rows (whose drafts are written to
the token table), the tokens, the sampled positions.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from surestep_kernels.columns.gpu.dependent_launch import DependentKernel, wait_for_earlier_kernels
from surestep_kernels.gather_tokens import TokenRuns
from surestep_kernels.gather_tokens.triton import gather_tokens
from surestep_kernels.slot_state import OUT_OF_BOUNDS, DraftIds, SlotState, StepRows

from .reference import StepInputs

_BLOCK = 256
_BAD: tl.constexpr = tl.constexpr(OUT_OF_BOUNDS)


@triton.jit
def _safe_slot(slot, lines):
    """Return the slot, or the NULL slot for one that does not exist; and whether it exists."""
    exists = (slot >= 0) & (slot < lines)
    return tl.where(exists, slot, lines - 1).to(tl.int64), exists


@DependentKernel
@triton.jit
def _rows_kernel(
    slot_ptr,  # i32[R]
    cu_ptr,  # i32[R+1]
    advances_ptr,  # i32[R]
    snapshot_len_ptr,  # i32[R]
    draft_ids_ptr,  # i32[R, K]
    counts_ptr,  # i32[R]
    tokens_ptr,  # i32[S, W]
    committed_ptr,  # i32[S]
    known_ptr,  # i32[S]
    folded_ptr,  # i32[S]
    error_ptr,  # i32[1]
    start_ptr,  # i32[R]
    valid_ptr,  # i32[R]
    out_slots_ptr,  # i64[R]
    pending_ptr,  # i32[R]
    after_ptr,  # i32[R]
    S,
    W,
    K,
    BLOCK_K: tl.constexpr,
):
    wait_for_earlier_kernels()
    row = tl.program_id(0).to(tl.int64)
    slot, exists = _safe_slot(tl.load(slot_ptr + row), S)
    if not exists:
        tl.atomic_or(error_ptr, _BAD)
    start, known = tl.load(committed_ptr + slot), tl.load(known_ptr + slot)
    held, snapshot_len = tl.load(folded_ptr + slot), tl.load(snapshot_len_ptr + row)
    n_drafts, advances = tl.load(counts_ptr + row), tl.load(advances_ptr + row)
    count = (tl.load(cu_ptr + row + 1) - tl.load(cu_ptr + row)) * advances
    valid = tl.where(advances > 0, count, n_drafts + 1)
    taken = (held < snapshot_len) & (snapshot_len <= start + count)
    tl.store(start_ptr + row, start)
    tl.store(valid_ptr + row, tl.where(slot < S - 1, valid, 0))
    tl.store(out_slots_ptr + row, slot)
    tl.store(pending_ptr + row, start - held)
    tl.store(after_ptr + row, tl.where(taken, snapshot_len - held, 0))
    draft = tl.arange(0, BLOCK_K)
    place = known + draft
    used = (draft < K) & (draft < n_drafts) & (place >= 0) & (place < W)
    ids = tl.load(draft_ids_ptr + row * K + draft, mask=used, other=0)
    tl.store(tokens_ptr + slot * W + place, ids, mask=used)


@DependentKernel
@triton.jit(do_not_specialize=["N"])
def _lengths_kernel(
    position_row_ptr,  # i32[N]
    offset_ptr,  # i32[N]
    slots_ptr,  # i64[R]
    known_ptr,  # i32[S]
    lengths_ptr,  # i32[N]
    N,
    BLOCK: tl.constexpr,
):
    wait_for_earlier_kernels()
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(position_row_ptr + n, mask=n < N, other=0).to(tl.int64)
    slot = tl.load(slots_ptr + row, mask=n < N, other=0)
    known = tl.load(known_ptr + slot, mask=n < N, other=0)
    offset = tl.load(offset_ptr + n, mask=n < N, other=0)
    tl.store(lengths_ptr + n, known + offset, mask=n < N)


def gather_step(
    rows: StepRows,
    drafts: DraftIds,
    state: SlotState,
    error: Tensor,
    block_size: int,
    num_blocks: int,
) -> StepInputs:
    num_rows, num_positions = len(rows.slot), len(rows.position_row)
    lines, width = state.tokens.shape
    num_drafts = drafts.ids.shape[1]
    words = functools.partial(torch.empty, dtype=torch.int32, device=rows.slot.device)
    start, valid, pending, after = (words(num_rows) for _ in range(4))
    lengths = words(num_positions)
    slots = torch.empty(num_rows, dtype=torch.int64, device=rows.slot.device)
    if num_rows:
        _rows_kernel[(num_rows,)](
            rows.slot,
            rows.cu_rows,
            rows.advances,
            rows.snapshot_len,
            drafts.ids,
            drafts.counts,
            state.tokens,
            state.committed,
            state.known,
            state.folded,
            error,
            start,
            valid,
            slots,
            pending,
            after,
            lines,
            width,
            num_drafts,
            BLOCK_K=triton.next_power_of_2(max(num_drafts, 1)),
        )
    runs = TokenRuns(rows.token_row, rows.cu_rows, slots, start, valid)
    tokens = gather_tokens(
        runs, state, error, shift=0, block_size=block_size, num_blocks=num_blocks
    )
    if num_positions:
        _lengths_kernel[(triton.cdiv(num_positions, _BLOCK),)](
            rows.position_row,
            rows.position_offset,
            slots,
            state.known,
            lengths,
            num_positions,
            BLOCK=_BLOCK,
        )
    return StepInputs(
        *tokens,
        start=start,
        valid=valid,
        slots=slots,
        pending=pending,
        snapshot_after=after,
        lengths=lengths,
    )
