"""From slots and geometry to the inputs of one forward pass, without asking the host."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from .slot_state import NULL_BLOCK, OUT_OF_BOUNDS, DraftIds, SlotState, StepRows


class StepInputs(NamedTuple):
    """T tokens, R rows, N sampled positions."""

    token_ids: Tensor  # i64[T]
    positions: Tensor  # i64[T]
    kv_slots: Tensor  # i64[T] those of padding lie in the NULL block
    start: Tensor  # i32[R] committed length
    block_tables: Tensor  # i32[R, B]
    slots: Tensor  # i64[R]
    pending: Tensor  # i32[R] records to fold
    snapshot_after: Tensor  # i32[R] see RecurrentRows
    lengths: Tensor  # i32[N] history length: index of the token to choose


class GatherStep(Protocol):
    """See gather_step_reference."""

    def __call__(
        self, rows: StepRows, drafts: DraftIds, state: SlotState, error: Tensor,
        block_size: int, num_blocks: int,
    ) -> StepInputs: ...  # fmt: skip


def gather_step_reference(
    rows: StepRows,
    drafts: DraftIds,
    state: SlotState,
    error: Tensor,
    block_size: int,
    num_blocks: int,
) -> StepInputs:
    """Write the drafts behind the known tokens of their slots, and look everything up.

    A row's tokens stand at positions committed, committed + 1, ..; in a window those behind its
    drafts are padding. What would lie outside of a tensor is replaced by the NULL slot, block or
    position, and told in `error` i32[1].
    """
    lines, width = state.tokens.shape
    slot = rows.slot.long()
    bad_slot = (slot < 0) | (slot >= lines)
    slot = torch.where(bad_slot, lines - 1, slot)
    _write_drafts(slot, drafts, state)
    start = state.committed[slot].long()
    token_row = rows.token_row.long()
    offset = torch.arange(len(token_row), device=slot.device) - rows.cu_rows[token_row].long()
    real = (rows.advances[token_row] > 0) | (offset <= drafts.counts[token_row])
    position = start[token_row] + offset
    page = position // block_size
    inside = (position >= 0) & (position < width) & (page < state.block_tables.shape[1])
    position = torch.where(inside, position, 0)
    block = state.block_tables[slot[token_row], torch.where(inside, page, 0)].long()
    inside &= (block >= 0) & (block < num_blocks)
    error |= OUT_OF_BOUNDS * (bad_slot.any() | (real & ~inside).any()).int()
    block = torch.where(real & inside, block, NULL_BLOCK)
    ids = state.tokens[slot[token_row], position].long()
    count = (rows.cu_rows[1:] - rows.cu_rows[:-1]).long() * rows.advances
    return StepInputs(
        token_ids=torch.where(real & inside, ids, 0),
        positions=position,
        kv_slots=block * block_size + position % block_size,
        start=start.int(),
        block_tables=state.block_tables[slot],
        slots=slot,
        pending=(start - state.folded[slot]).int(),
        snapshot_after=_snapshot_after(rows, state.folded[slot], start + count),
        lengths=state.known[slot[rows.position_row.long()]] + rows.position_offset,
    )


def _write_drafts(slot: Tensor, drafts: DraftIds, state: SlotState) -> None:
    column = torch.arange(drafts.ids.shape[1], device=slot.device)
    place = state.known[slot].long().unsqueeze(1) + column
    used = (column < drafts.counts.unsqueeze(1)) & (place < state.tokens.shape[1])
    line = slot.unsqueeze(1).expand_as(place)
    state.tokens[line[used], place[used]] = drafts.ids[used].int()


def _snapshot_after(rows: StepRows, held: Tensor, after: Tensor) -> Tensor:
    """Tokens from the state that is held to the armed one, if this step gets there; else 0."""
    taken = (held < rows.snapshot_len) & (rows.snapshot_len <= after)
    return torch.where(taken, rows.snapshot_len - held, 0).int()
