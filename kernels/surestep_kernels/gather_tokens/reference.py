"""Runs of tokens read from the slots: ids, positions and slots of the KV cache."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from surestep_common.invariants import NULL_BLOCK
from torch import Tensor

from surestep_kernels.slot_state import OUT_OF_BOUNDS, SlotState


class TokenRuns(NamedTuple):
    """R runs of up to T tokens together."""

    token_row: Tensor  # i32[T] row of each token
    cu_rows: Tensor  # i32[R+1] row r has room for tokens cu_rows[r]:cu_rows[r+1]
    slots: Tensor  # i64[R] that exist
    start: Tensor  # i32[R] position of the first token
    valid: Tensor  # i32[R] tokens; those behind are padding


class TokenInputs(NamedTuple):
    """Inputs of T tokens, all i64."""

    token_ids: Tensor  # [T]
    positions: Tensor  # [T]
    kv_slots: Tensor  # [G, T] in every KV group


class GatherTokens(Protocol):
    def __call__(
        self,
        runs: TokenRuns,
        state: SlotState,
        error: Tensor,
        *,
        shift: int,
        block_size: int,
        num_blocks: int,
    ) -> TokenInputs: ...


def gather_tokens_reference(
    runs: TokenRuns,
    state: SlotState,
    error: Tensor,
    *,
    shift: int,
    block_size: int,
    num_blocks: int,
) -> TokenInputs:
    """Look up positions start, start + 1, .. of every run, each with the token `shift` after it.

    Padding has token 0 and lies in the NULL block. A position or block that does not exist is
    replaced by padding and reported in `error` i32[1].
    """
    row = runs.token_row.long()
    slot, width = runs.slots[row], state.tokens.shape[1]
    offset = torch.arange(len(row), device=slot.device) - runs.cu_rows[row].long()
    real = offset < runs.valid[row]
    position = runs.start[row].long() + offset
    page = position // block_size
    inside = (position >= 0) & (position + shift < width) & (page < state.block_tables.shape[2])
    position = torch.where(inside, position, 0)
    block = state.block_tables[:, slot, torch.where(inside, page, 0)].long()
    inside &= ((block >= 0) & (block < num_blocks)).all(dim=0)
    error |= OUT_OF_BOUNDS * (real & ~inside).any().int()
    usable = real & inside
    ids = state.tokens[slot, torch.where(inside, position + shift, 0)].long()
    block = torch.where(usable, block, NULL_BLOCK)
    return TokenInputs(
        torch.where(usable, ids, 0), position, block * block_size + position % block_size
    )
