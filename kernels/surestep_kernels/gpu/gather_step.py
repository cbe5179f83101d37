"""From slots and geometry to the inputs of one forward pass.

Three launches, each of which needs what the one before wrote: the rows (whose drafts go into the
token table), the tokens, the sampled positions.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from surestep_kernels.gather_step import StepInputs
from surestep_kernels.slot_state import NULL_BLOCK, OUT_OF_BOUNDS, DraftIds, SlotState, StepRows

_BLOCK = 256
_BAD: tl.constexpr = tl.constexpr(OUT_OF_BOUNDS)
_NULL: tl.constexpr = tl.constexpr(NULL_BLOCK)


@triton.jit
def _safe_slot(slot, lines):
    """The slot, or the NULL slot for one that does not exist; and whether it exists."""
    exists = (slot >= 0) & (slot < lines)
    return tl.where(exists, slot, lines - 1).to(tl.int64), exists


@triton.jit
def _rows_kernel(
    slot_ptr,  # i32[R]
    cu_ptr,  # i32[R+1]
    advances_ptr,  # i32[R]
    armed_ptr,  # i32[R]
    draft_ids_ptr,  # i32[R, K]
    counts_ptr,  # i32[R]
    tokens_ptr,  # i32[S, W]
    tables_ptr,  # i32[S, B]
    committed_ptr,  # i32[S]
    known_ptr,  # i32[S]
    folded_ptr,  # i32[S]
    error_ptr,  # i32[1]
    start_ptr,  # i32[R]
    out_tables_ptr,  # i32[R, B]
    out_slots_ptr,  # i64[R]
    pending_ptr,  # i32[R]
    after_ptr,  # i32[R]
    S,
    W,
    B,
    K,
    BLOCK_K: tl.constexpr,
    BLOCK_B: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    slot, exists = _safe_slot(tl.load(slot_ptr + row), S)
    if not exists:
        tl.atomic_or(error_ptr, _BAD)
    start, known = tl.load(committed_ptr + slot), tl.load(known_ptr + slot)
    held, armed = tl.load(folded_ptr + slot), tl.load(armed_ptr + row)
    count = (tl.load(cu_ptr + row + 1) - tl.load(cu_ptr + row)) * tl.load(advances_ptr + row)
    taken = (held < armed) & (armed <= start + count)
    tl.store(start_ptr + row, start)
    tl.store(out_slots_ptr + row, slot)
    tl.store(pending_ptr + row, start - held)
    tl.store(after_ptr + row, tl.where(taken, armed - held, 0))
    draft = tl.arange(0, BLOCK_K)
    place = known + draft
    used = (draft < K) & (draft < tl.load(counts_ptr + row)) & (place >= 0) & (place < W)
    ids = tl.load(draft_ids_ptr + row * K + draft, mask=used, other=0)
    tl.store(tokens_ptr + slot * W + place, ids, mask=used)
    for first in range(0, B, BLOCK_B):
        page = first + tl.arange(0, BLOCK_B)
        blocks = tl.load(tables_ptr + slot * B + page, mask=page < B, other=_NULL)
        tl.store(out_tables_ptr + row * B + page, blocks, mask=page < B)


@triton.jit(do_not_specialize=["T"])  # varies: every step would compile for some
def _tokens_kernel(
    token_row_ptr,  # i32[T]
    cu_ptr,  # i32[R+1]
    advances_ptr,  # i32[R]
    counts_ptr,  # i32[R]
    start_ptr,  # i32[R]
    slots_ptr,  # i64[R] that exist
    tokens_ptr,  # i32[S, W]
    tables_ptr,  # i32[S, B]
    error_ptr,  # i32[1]
    ids_ptr,  # i64[T]
    positions_ptr,  # i64[T]
    kv_slots_ptr,  # i64[T]
    T,
    W,
    B,
    block_size,
    num_blocks,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = token < T
    row = tl.load(token_row_ptr + token, mask=mask, other=0).to(tl.int64)
    slot = tl.load(slots_ptr + row, mask=mask, other=0)
    offset = (token - tl.load(cu_ptr + row, mask=mask, other=0)).to(tl.int32)
    count = tl.load(counts_ptr + row, mask=mask, other=0)
    real = mask & ((tl.load(advances_ptr + row, mask=mask, other=0) > 0) | (offset <= count))
    position = tl.load(start_ptr + row, mask=mask, other=0) + offset
    page = position // block_size
    inside = (position >= 0) & (position < W) & (page < B)
    position = tl.where(inside, position, 0)
    block = tl.load(tables_ptr + slot * B + page, mask=mask & inside, other=_NULL)
    inside = inside & (block >= 0) & (block < num_blocks)
    if tl.max((real & (inside == 0)).to(tl.int32), axis=0) > 0:
        tl.atomic_or(error_ptr, _BAD)
    usable = real & inside
    block = tl.where(usable, block, _NULL).to(tl.int64)
    ids = tl.load(tokens_ptr + slot * W + position, mask=usable, other=0)
    tl.store(ids_ptr + token, ids.to(tl.int64), mask=mask)
    tl.store(positions_ptr + token, position.to(tl.int64), mask=mask)
    tl.store(kv_slots_ptr + token, block * block_size + position % block_size, mask=mask)


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
    """See gather_step_reference."""
    num_rows, num_tokens = len(rows.slot), len(rows.token_row)
    num_positions = len(rows.position_row)
    lines, width = state.tokens.shape
    pages, num_drafts = state.block_tables.shape[1], drafts.ids.shape[1]
    inputs = _allocate(num_rows, num_tokens, num_positions, pages, rows.slot.device)
    if num_rows:
        _rows_kernel[(num_rows,)](
            rows.slot, rows.cu_rows, rows.advances, rows.snapshot_len, drafts.ids, drafts.counts,
            state.tokens, state.block_tables, state.committed, state.known, state.folded, error,
            inputs.start, inputs.block_tables, inputs.slots, inputs.pending, inputs.snapshot_after,
            lines, width, pages, num_drafts,
            BLOCK_K=triton.next_power_of_2(max(num_drafts, 1)), BLOCK_B=_BLOCK,
        )  # fmt: skip
    if num_tokens:
        _tokens_kernel[(triton.cdiv(num_tokens, _BLOCK),)](
            rows.token_row, rows.cu_rows, rows.advances, drafts.counts, inputs.start, inputs.slots,
            state.tokens, state.block_tables, error,
            inputs.token_ids, inputs.positions, inputs.kv_slots,
            num_tokens, width, pages, block_size, num_blocks, BLOCK=_BLOCK,
        )  # fmt: skip
    if num_positions:
        _lengths_kernel[(triton.cdiv(num_positions, _BLOCK),)](
            rows.position_row, rows.position_offset, inputs.slots, state.known, inputs.lengths,
            num_positions, BLOCK=_BLOCK,
        )  # fmt: skip
    return inputs


def _allocate(
    num_rows: int, num_tokens: int, num_positions: int, pages: int, device: torch.device
) -> StepInputs:
    def words(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int32, device=device)

    def longs(count: int) -> Tensor:
        return torch.empty(count, dtype=torch.int64, device=device)

    return StepInputs(
        token_ids=longs(num_tokens),
        positions=longs(num_tokens),
        kv_slots=longs(num_tokens),
        start=words(num_rows),
        block_tables=words(num_rows, pages),
        slots=longs(num_rows),
        pending=words(num_rows),
        snapshot_after=words(num_rows),
        lengths=words(num_positions),
    )
