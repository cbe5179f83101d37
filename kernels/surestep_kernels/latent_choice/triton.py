"""The choice of the positions that a token attends to, in Triton.

Scores of some tokens are kept in scratch; then a program for each token finds the score from which
positions are chosen, by halves of what it may be, and writes the positions down in order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from surestep_kernels.columns.gpu.dependent_launch import DependentKernel, wait_for_earlier_kernels
from surestep_kernels.latent_attention.triton import (
    arithmetic,
    check,
    lines_of,
    load_part,
    multiply,
    seen_by,
)
from surestep_kernels.paged_attention import AttentionRows

_TOKENS = 64  # whose scores are kept at once
_SCORED = 64  # positions of a program
_SOUGHT = 1024  # scores that are compared at once


@DependentKernel
@triton.jit(do_not_specialize=["first", "num_rows", "num_blocks", "table_width"])
def _score_positions_kernel(
    scores_ptr,  # f32[tokens, positions] of tokens first, first + 1, ..
    q_ptr,  # [T, H, D]
    weights_ptr,  # f32[T, H]
    pages_ptr,  # [blocks, BLOCK_SIZE, D]
    tables_ptr,  # i32[S, table_width]
    slots_ptr,
    cu_rows_ptr,
    start_ptr,
    first,
    num_rows,
    num_blocks,
    table_width,
    H: tl.constexpr,
    D: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    POSITIONS: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDEN: tl.constexpr,
):
    wait_for_earlier_kernels()
    token, base = first + tl.program_id(0), tl.program_id(1) * POSITIONS
    row, seen = seen_by(token, cu_rows_ptr, start_ptr, num_rows)
    if (seen <= TOP_K) | (base >= seen):
        return
    table_ptr = tables_ptr + tl.load(slots_ptr + row) * table_width
    position, head = base + tl.arange(0, POSITIONS), tl.arange(0, BLOCK_H)
    used = (position < seen) & (position < table_width * BLOCK_SIZE)
    line, held = lines_of(position, used, table_ptr, num_blocks, BLOCK_SIZE)
    flat = token.to(tl.int64) * H + head
    q = load_part(q_ptr, flat, head < H, D, 0, D, BLOCK_D)
    keys = load_part(pages_ptr, line, held, D, 0, D, BLOCK_D).to(q.dtype)
    products = tl.zeros((BLOCK_H, POSITIONS), tl.float32)
    products = multiply(q, tl.trans(keys), products, PRECISION, WIDEN)
    weight = tl.load(weights_ptr + flat, mask=head < H, other=0.0)
    products = tl.where(products < 0.0, 0.0, products)  # NaN stays
    scores = tl.sum(products * weight[:, None], axis=0)
    to = scores_ptr + tl.program_id(0).to(tl.int64) * (table_width * BLOCK_SIZE) + position
    tl.store(to, scores, mask=used)


@triton.jit
def _load_ranks(scores_ptr, position, seen):
    """Load numbers that grow with scores: i64. -0 counts as 0, NaN as more than anything."""
    score = tl.load(scores_ptr + position, mask=position < seen, other=float("-inf")) + 0.0
    bits = score.to(tl.int32, bitcast=True)
    rank = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    rank = tl.where(score != score, 0x7FFFFFFF, rank).to(tl.int64)
    return tl.where(position < seen, rank, -0x80000001)


@triton.jit
def _count_from(scores_ptr, seen, least, BLOCK: tl.constexpr):
    """Return how many scores have at least the rank `least`."""
    count = 0
    for base in range(0, seen, BLOCK):
        rank = _load_ranks(scores_ptr, base + tl.arange(0, BLOCK), seen)
        count += tl.sum((rank >= least).to(tl.int32), axis=0)
    return count


@DependentKernel
@triton.jit(do_not_specialize=["first", "num_rows", "limit"])
def _choose_positions_kernel(
    chosen_ptr,  # i32[T, TOP_K]
    scores_ptr,  # f32[tokens, limit] of tokens first, first + 1, ..
    cu_rows_ptr,
    start_ptr,
    first,
    num_rows,
    limit,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Find the rank of the last score that is chosen bit by bit, then write down positions."""
    wait_for_earlier_kernels()
    token = first + tl.program_id(0)
    seen = seen_by(token, cu_rows_ptr, start_ptr, num_rows)[1]
    to, steps = chosen_ptr + token.to(tl.int64) * TOP_K, tl.arange(0, BLOCK)
    if seen <= TOP_K:
        for base in range(0, seen, BLOCK):
            tl.store(to + base + steps, base + steps, mask=base + steps < seen)
        return
    seen = tl.minimum(seen, limit)
    scores_ptr += tl.program_id(0).to(tl.int64) * limit
    least, step = tl.full((), -0x80000000, tl.int64), tl.full((), 0x80000000, tl.int64)
    for _ in range(32):
        enough = _count_from(scores_ptr, seen, least + step, BLOCK) >= TOP_K
        least = tl.where(enough, least + step, least)
        step = step // 2
    ties = TOP_K - _count_from(scores_ptr, seen, least + 1, BLOCK)
    taken, tied = 0, 0
    for base in range(0, seen, BLOCK):
        rank = _load_ranks(scores_ptr, base + steps, seen)
        is_tie = (rank == least).to(tl.int32)
        before = tied + tl.cumsum(is_tie, axis=0) - is_tie
        take = ((rank > least) | ((is_tie > 0) & (before < ties))).to(tl.int32)
        place = taken + tl.cumsum(take, axis=0) - take
        tl.store(to + place, base + steps, mask=take > 0)
        taken += tl.sum(take, axis=0)
        tied += tl.sum(is_tie, axis=0)


def choose(q: Tensor, weights: Tensor, pages: Tensor, rows: AttentionRows, top_k: int) -> Tensor:
    """Choose as latent_choice_reference does. What lies behind what a token sees is undefined."""
    tokens, heads, dim = q.shape
    check(q, pages, rows)
    assert weights.dtype is torch.float32
    assert weights.is_contiguous()
    width, num_rows = rows.block_tables.shape[1], len(rows.start)
    limit = width * pages.shape[1]
    chosen = torch.zeros(
        tokens, top_k, dtype=torch.int32, device=q.device
    )  # ranks compare all of it
    scores = torch.empty(min(tokens, _TOKENS), limit, device=q.device)
    for first in range(0, tokens, _TOKENS):
        count = min(_TOKENS, tokens - first)
        _score_positions_kernel[(count, triton.cdiv(limit, _SCORED))](
            scores,
            q,
            weights,
            pages,
            *rows[:4],
            first,
            num_rows,
            len(pages),
            width,
            H=heads,
            D=dim,
            TOP_K=top_k,
            BLOCK_SIZE=pages.shape[1],
            BLOCK_H=max(16, triton.next_power_of_2(heads)),
            BLOCK_D=max(16, triton.next_power_of_2(dim)),
            POSITIONS=_SCORED,
            **arithmetic(q),
            num_stages=1,
            enable_fp_fusion=False,
        )
        _choose_positions_kernel[(count,)](
            chosen,
            scores,
            rows.cu_rows,
            rows.start,
            first,
            num_rows,
            limit,
            TOP_K=top_k,
            BLOCK=_SOUGHT,
        )
    return chosen
