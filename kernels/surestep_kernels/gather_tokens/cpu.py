"""Gathering tokens in C."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from surestep_kernels.columns.cpu.binding import CFunction, Library, struct, table_sizes
from surestep_kernels.slot_state import SlotState

from .reference import TokenInputs, TokenRuns


def load(library: Library) -> dict[str, CFunction]:
    """Return the op."""
    run = library.short("gather_tokens", "4P 2l P")
    return {"gather_tokens": partial(gather_tokens, run)}


def gather_tokens(
    run: CFunction,
    runs: TokenRuns,
    state: SlotState,
    error: Tensor,
    *,
    shift: int,
    block_size: int,
    num_blocks: int,
) -> TokenInputs:
    num_tokens = len(runs.token_row)
    inputs = empty_inputs(num_tokens, state)
    structs = struct(inputs), struct(runs), struct(state)
    sizes = table_sizes(state, block_size, num_blocks)
    run(*structs, error.data_ptr(), num_tokens, shift, sizes)
    return inputs


def empty_inputs(num_tokens: int, state: SlotState) -> TokenInputs:
    """Return room for T tokens and their places in every KV group."""
    words = torch.empty(2 + len(state.block_tables), num_tokens, dtype=torch.int64)
    return TokenInputs(words[0], words[1], words[2:])
