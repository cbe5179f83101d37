"""Gathering a step's inputs in C."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from surestep_kernels.columns.cpu.binding import (
    CFunction,
    Library,
    empty_columns,
    struct,
    table_sizes,
)
from surestep_kernels.gather_tokens.cpu import empty_inputs
from surestep_kernels.slot_state import DraftIds, SlotState, StepRows

from .reference import StepInputs


def load(library: Library) -> dict[str, CFunction]:
    """Return the op."""
    run = library.short("gather_step", "5P 4l P")
    return {"gather_step": partial(gather_step, run)}


def gather_step(
    run: CFunction,
    rows: StepRows,
    drafts: DraftIds,
    state: SlotState,
    error: Tensor,
    block_size: int,
    num_blocks: int,
) -> StepInputs:
    num_rows, num_drafts = drafts.ids.shape
    num_tokens, num_positions = len(rows.token_row), len(rows.position_row)
    tokens = empty_inputs(num_tokens, state)
    slots = torch.empty(num_rows, dtype=torch.int64)
    columns = empty_columns(torch.int32, [num_rows] * 4 + [num_positions])
    start, valid, pending, snapshot_after, lengths = columns
    inputs = StepInputs(*tokens, start, valid, slots, pending, snapshot_after, lengths)
    structs = struct(inputs), struct(rows), struct(drafts), struct(state)
    counts = num_rows, num_tokens, num_positions, num_drafts
    run(*structs, error.data_ptr(), *counts, table_sizes(state, block_size, num_blocks))
    return inputs
