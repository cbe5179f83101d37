"""Prompt lookup in Triton: every place of a row is tried at once, then drafts are read from the
best.

The first kernel leaves the best place of each block of a row as a key: the length of the match in
the high half, its last index plus one in the low half, 0 without a match. The greatest key of a row
is the most recent of the longest matches. The grid covers the whole token table, because the host
does not know the lengths; blocks past the end of a row read nothing.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from surestep_kernels.columns.gpu.dependent_launch import DependentKernel, wait_for_earlier_kernels

from .reference import NgramDrafts, RecentTexts

_BLOCK = 1024  # places that one program tries


@triton.jit
def _line(tokens_ptr, slots_ptr, lengths_ptr, row, num_slots, width):
    """Return the tokens of a row, and how many are known; none in a slot that is out of bounds."""
    slot = tl.load(slots_ptr + row).to(tl.int64)
    length = tl.minimum(tl.load(lengths_ptr + row).to(tl.int64), width)
    inside = (slot >= 0) & (slot < num_slots)
    return tokens_ptr + tl.where(inside, slot, 0) * width, tl.where(inside, length, 0)


@DependentKernel
@triton.jit
def _match_kernel(
    keys_ptr,  # i64[R, B]
    tokens_ptr,  # i32[S, W]
    slots_ptr,  # [R], as lengths
    lengths_ptr,  # [R]
    num_slots,  # S
    width,  # W
    max_n,
    min_n,
    BLOCK: tl.constexpr,
):
    wait_for_earlier_kernels()
    row = tl.program_id(0).to(tl.int64)
    line, length = _line(tokens_ptr, slots_ptr, lengths_ptr, row, num_slots, width)
    last = length - 1
    end = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    alive = end < last
    matched = tl.zeros((BLOCK,), tl.int64)
    for n in range(max_n):
        alive &= end >= n
        newest = tl.load(line + last - n, mask=last >= n, other=-1)
        alive &= tl.load(line + end - n, mask=alive, other=-1) == newest
        matched += alive.to(tl.int64)
    keys = tl.where(matched >= min_n, (matched << 32) | (end + 1), 0)
    tl.store(keys_ptr + row * tl.num_programs(1) + tl.program_id(1), tl.max(keys, axis=0))


@DependentKernel
@triton.jit
def _propose_kernel(
    ids_ptr,  # [R, K], all integers as slots
    counts_ptr,  # [R]
    keys_ptr,  # i64[R, B]
    tokens_ptr,  # i32[S, W]
    slots_ptr,  # [R]
    lengths_ptr,  # [R]
    max_drafts_ptr,  # [R]
    num_slots,  # S
    width,  # W
    blocks,  # B
    num_drafts,  # K
    BLOCKS: tl.constexpr,
    DRAFTS: tl.constexpr,
):
    wait_for_earlier_kernels()
    row = tl.program_id(0).to(tl.int64)
    line, length = _line(tokens_ptr, slots_ptr, lengths_ptr, row, num_slots, width)
    block, ahead = tl.arange(0, BLOCKS), tl.arange(0, DRAFTS)
    key = tl.max(tl.load(keys_ptr + row * blocks + block, mask=block < blocks, other=0), axis=0)
    follows = key & 0xFFFFFFFF  # index after the match
    cap = tl.minimum(tl.load(max_drafts_ptr + row).to(tl.int64), num_drafts)
    count = tl.where(key > 0, cap, 0)
    at = follows + ahead % tl.maximum(length - follows, 1)
    ids = tl.load(line + at, mask=ahead < count, other=0).to(ids_ptr.dtype.element_ty)
    tl.store(ids_ptr + row * num_drafts + ahead, ids, mask=ahead < num_drafts)
    tl.store(counts_ptr + row, count.to(counts_ptr.dtype.element_ty))


def ngram(
    tokens: Tensor,
    slots: Tensor,
    lengths: Tensor,
    max_drafts: Tensor,
    *,
    num_drafts: int,
    max_n: int,
    min_n: int,
    recent: RecentTexts | None = None,
) -> NgramDrafts:
    assert recent is None
    rows, (num_slots, width) = len(slots), tokens.shape
    assert 1 <= min_n <= max_n
    assert num_drafts >= 1
    assert tokens.is_contiguous()
    assert tokens.dtype is torch.int32
    assert slots.dtype is lengths.dtype is max_drafts.dtype
    assert slots.dtype in (torch.int32, torch.int64)
    assert slots.shape == lengths.shape == max_drafts.shape == (rows,)
    ids, counts = slots.new_empty(rows, num_drafts), slots.new_empty(rows)
    blocks = triton.cdiv(width, _BLOCK)
    keys = slots.new_empty(rows, blocks, dtype=torch.int64)
    table = num_slots, width
    if rows == 0:
        return NgramDrafts(ids, counts)
    _match_kernel[rows, blocks](keys, tokens, slots, lengths, *table, max_n, min_n, BLOCK=_BLOCK)
    _propose_kernel[(rows,)](
        ids,
        counts,
        keys,
        tokens,
        slots,
        lengths,
        max_drafts,
        *table,
        blocks,
        num_drafts,
        BLOCKS=triton.next_power_of_2(blocks),
        DRAFTS=triton.next_power_of_2(num_drafts),
    )
    return NgramDrafts(ids, counts)
