"""From slots and geometry to the inputs of one forward pass, without waiting for the host."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from surestep_kernels.gather_tokens import TokenRuns, gather_tokens_reference
from surestep_kernels.slot_state import OUT_OF_BOUNDS, DraftIds, SlotState, StepRows


class StepInputs(NamedTuple):
    """Inputs of a step with T tokens, R rows and N sampled positions."""

    token_ids: Tensor  # i64[T]
    positions: Tensor  # i64[T]
    kv_slots: Tensor  # i64[G, T] those of padding lie in the NULL block
    start: Tensor  # i32[R] committed length
    valid: Tensor  # i32[R] how many of a row's tokens are not padding
    slots: Tensor  # i64[R]
    pending: Tensor  # i32[R] records to fold
    snapshot_after: Tensor  # i32[R] see RecurrentRows
    lengths: Tensor  # i32[N] history length: index of the token to choose


class GatherStep(Protocol):
    def __call__(
        self,
        rows: StepRows,
        drafts: DraftIds,
        state: SlotState,
        error: Tensor,
        block_size: int,
        num_blocks: int,
    ) -> StepInputs: ...


def gather_step_reference(
    rows: StepRows,
    drafts: DraftIds,
    state: SlotState,
    error: Tensor,
    block_size: int,
    num_blocks: int,
) -> StepInputs:
    """Write the drafts after the known tokens of their slots, and look up the inputs of the step.

    A row's tokens are at positions committed, committed + 1, ..; in a window those after its drafts
    are padding, and so is everything in a row of the NULL slot. A slot that does not exist is
    replaced by the NULL slot and reported in `error` i32[1].
    """
    null = len(state.tokens) - 1
    slot = rows.slot.long()
    bad_slot = (slot < 0) | (slot > null)
    slot = torch.where(bad_slot, null, slot)
    error |= OUT_OF_BOUNDS * bad_slot.any().int()
    _write_drafts(slot, drafts, state)
    start = state.committed[slot].long()
    room = (rows.cu_rows[1:] - rows.cu_rows[:-1]).long()
    valid = torch.where(rows.advances > 0, room, drafts.counts + 1) * (slot < null)
    runs = TokenRuns(rows.token_row, rows.cu_rows, slot, start.int(), valid.int())
    tokens = gather_tokens_reference(
        runs, state, error, shift=0, block_size=block_size, num_blocks=num_blocks
    )
    return StepInputs(
        *tokens,
        start=runs.start,
        valid=runs.valid,
        slots=slot,
        pending=(start - state.folded[slot]).int(),
        snapshot_after=_snapshot_after(rows, state.folded[slot], start + room * rows.advances),
        lengths=state.known[slot[rows.position_row.long()]] + rows.position_offset,
    )


def _write_drafts(slot: Tensor, drafts: DraftIds, state: SlotState) -> None:
    column = torch.arange(drafts.ids.shape[1], device=slot.device)
    place = state.known[slot].long().unsqueeze(1) + column
    used = (column < drafts.counts.unsqueeze(1)) & (place < state.tokens.shape[1])
    line = slot.unsqueeze(1).expand_as(place)
    state.tokens[line[used], place[used]] = drafts.ids[used].int()


def _snapshot_after(rows: StepRows, held: Tensor, after: Tensor) -> Tensor:
    """Return the tokens from the held state to the requested snapshot, if this step gets there;
    else 0."""
    taken = (held < rows.snapshot_len) & (rows.snapshot_len <= after)
    return torch.where(taken, rows.snapshot_len - held, 0).int()
