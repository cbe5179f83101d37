"""Runs of tokens read from the slots, in Triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from surestep_common.invariants import NULL_BLOCK
from torch import Tensor

from surestep_kernels.columns.gpu.dependent_launch import DependentKernel, wait_for_earlier_kernels
from surestep_kernels.slot_state import OUT_OF_BOUNDS, SlotState

from .reference import TokenInputs, TokenRuns

_BLOCK = 256
_BAD: tl.constexpr = tl.constexpr(OUT_OF_BOUNDS)
_NULL: tl.constexpr = tl.constexpr(NULL_BLOCK)


@DependentKernel
@triton.jit(do_not_specialize=["T", "line"])  # vary from step to step: specialising would recompile
def _tokens_kernel(
    token_row_ptr,  # i32[T]
    cu_ptr,  # i32[R+1]
    slots_ptr,  # i64[R]
    start_ptr,  # i32[R]
    valid_ptr,  # i32[R]
    tokens_ptr,  # i32[S, W]
    tables_ptr,  # i32[G, S, B]
    error_ptr,  # i32[1]
    ids_ptr,  # i64[T]
    positions_ptr,  # i64[T]
    kv_slots_ptr,  # i64[G, T], lines apart
    T,
    line,
    S,
    W,
    B,
    block_size,
    num_blocks,
    GROUPS: tl.constexpr,
    SHIFT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    wait_for_earlier_kernels()
    token = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = token < T
    row = tl.load(token_row_ptr + token, mask=mask, other=0).to(tl.int64)
    slot = tl.load(slots_ptr + row, mask=mask, other=0)
    offset = (token - tl.load(cu_ptr + row, mask=mask, other=0)).to(tl.int32)
    real = mask & (offset < tl.load(valid_ptr + row, mask=mask, other=0))
    position = tl.load(start_ptr + row, mask=mask, other=0) + offset
    page = position // block_size
    inside = (position >= 0) & (position + SHIFT < W) & (page < B)
    position = tl.where(inside, position, 0)
    entry, table = tables_ptr + slot * B + page, tl.cast(S, tl.int64) * B
    found = mask & inside
    for group in tl.static_range(GROUPS):
        block = tl.load(entry + group * table, mask=found, other=_NULL)
        inside = inside & (block >= 0) & (block < num_blocks)
    if tl.max((real & (inside == 0)).to(tl.int32), axis=0) > 0:
        tl.atomic_or(error_ptr, _BAD)
    usable = real & inside
    ids = tl.load(tokens_ptr + slot * W + position + SHIFT, mask=usable, other=0)
    tl.store(ids_ptr + token, ids.to(tl.int64), mask=mask)
    tl.store(positions_ptr + token, position.to(tl.int64), mask=mask)
    for group in tl.static_range(GROUPS):
        block = tl.load(entry + group * table, mask=usable, other=_NULL).to(tl.int64)
        place = block * block_size + position % block_size
        tl.store(kv_slots_ptr + group * tl.cast(line, tl.int64) + token, place, mask=mask)


def gather_tokens(
    runs: TokenRuns,
    state: SlotState,
    error: Tensor,
    *,
    shift: int,
    block_size: int,
    num_blocks: int,
) -> TokenInputs:
    num_tokens, width = len(runs.token_row), state.tokens.shape[1]
    groups, lines, pages = state.block_tables.shape
    # Every row begins at a multiple of 16 bytes: kernels are compiled for how pointers are aligned.
    line = num_tokens + num_tokens % 2
    places = torch.empty(2 + groups, line, dtype=torch.int64, device=runs.token_row.device)
    places = places[:, :num_tokens]
    inputs = TokenInputs(places[0], places[1], places[2:])
    if num_tokens:
        _tokens_kernel[(triton.cdiv(num_tokens, _BLOCK),)](
            *runs,
            state.tokens,
            state.block_tables,
            error,
            *inputs,
            num_tokens,
            line,
            lines,
            width,
            pages,
            block_size,
            num_blocks,
            GROUPS=groups,
            SHIFT=shift,
            BLOCK=_BLOCK,
        )
    return inputs
