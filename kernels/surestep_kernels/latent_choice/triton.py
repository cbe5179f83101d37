"""The choice of the positions that a token attends to, in Triton.

Scores of some tokens are kept in scratch, computed by programs that share out the positions which
exist (latent_attention/work.py). Then a program for each token finds the score from which positions
are chosen, by quarters of what it may be, and writes the positions down in order.

What is chosen is exact: it follows from the scores alone, not from how it is found.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from surestep_kernels.columns.gpu.dependent_launch import DependentKernel, wait_for_earlier_kernels
from surestep_kernels.latent_attention.triton import arithmetic, check, lines_of, load_part
from surestep_kernels.latent_attention.work import Rows, count_units, find_unit, seen_by
from surestep_kernels.paged_attention import AttentionRows
from surestep_kernels.paged_attention.grid import PROGRAMS, SPLIT
from surestep_kernels.paged_attention.tile import multiply

_MAX_SCORES = 64 << 20  # bytes of scores that are kept at once
_SCORED = 64  # positions that are scored at once
_SOUGHT = 8192  # scores that are compared at once, at most
_EVERY = tl.constexpr(1 << 30)  # tokens of a row


class Shape(NamedTuple):
    """The constants that scores are compiled for."""

    H: int
    D: int
    TOP_K: int
    BLOCK_SIZE: int
    BLOCK_H: int
    BLOCK_D: int
    POSITIONS: int
    SPLIT: int
    PRECISION: str
    WIDEN: bool  # for Triton's interpreter, which cannot multiply bfloat16


@triton.jit
def _score_split(to_ptr, q, weight, pages_ptr, table_ptr, num_blocks, begin, end, C: tl.constexpr):
    """Store the scores of positions begin..end."""
    BLOCK_H: tl.constexpr = C.BLOCK_H  # Triton 3.6 does not accept a field in a shape
    POSITIONS: tl.constexpr = C.POSITIONS
    for base in range(begin, end, POSITIONS):
        position = base + tl.arange(0, POSITIONS)
        used = position < end
        line, held = lines_of(position, used, table_ptr, num_blocks, C.BLOCK_SIZE)
        keys = load_part(pages_ptr, line, held, C.D, 0, C.D, C.BLOCK_D).to(q.dtype)
        products = tl.zeros((BLOCK_H, POSITIONS), tl.float32)
        products = multiply(q, tl.trans(keys), products, C)
        products = tl.where(products < 0.0, 0.0, products)  # NaN stays
        tl.store(to_ptr + position, tl.sum(products * weight[:, None], axis=0), mask=used)


@DependentKernel
@triton.jit(do_not_specialize=["first", "end", "num_rows", "num_blocks", "table_width"])
def _score_positions_kernel(
    scores_ptr,  # f32[tokens, positions] of tokens first, first + 1, ..
    q_ptr,  # [T, H, D]
    weights_ptr,  # f32[T, H]
    pages_ptr,  # [blocks, BLOCK_SIZE, D]
    tables_ptr,  # i32[S, table_width]
    slots_ptr,  # i64[R]
    cu_rows_ptr,  # i32[R+1]
    start_ptr,  # i32[R]
    first,
    end,
    num_rows,
    num_blocks,
    table_width,
    C: tl.constexpr,
):
    wait_for_earlier_kernels()
    limit, head = table_width * C.BLOCK_SIZE, tl.arange(0, C.BLOCK_H)
    rows = Rows(cu_rows_ptr, start_ptr, num_rows, first, end, table_width, limit, 2147483647)
    units = count_units(rows, C.SPLIT, C.TOP_K, _EVERY)
    for unit in range(tl.program_id(0), units, tl.num_programs(0)):
        row, token, split, _ = find_unit(rows, unit, C.SPLIT, C.TOP_K, _EVERY)
        seen = tl.load(start_ptr + row) + token - tl.load(cu_rows_ptr + row) + 1
        flat = token.to(tl.int64) * C.H + head
        q = load_part(q_ptr, flat, head < C.H, C.D, 0, C.D, C.BLOCK_D)
        weight = tl.load(weights_ptr + flat, mask=head < C.H, other=0.0)
        table_ptr = tables_ptr + tl.load(slots_ptr + row) * table_width
        to_ptr = scores_ptr + (token - first).to(tl.int64) * limit
        begin = split * C.SPLIT
        behind = tl.minimum(tl.minimum(begin + C.SPLIT, seen), limit)
        _score_split(to_ptr, q, weight, pages_ptr, table_ptr, num_blocks, begin, behind, C)


@triton.jit
def _load_ranks(scores_ptr, position, seen):
    """Load numbers that grow with scores: i64. -0 counts as 0, NaN as more than anything."""
    score = tl.load(scores_ptr + position, mask=position < seen, other=float("-inf")) + 0.0
    bits = score.to(tl.int32, bitcast=True)
    rank = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    rank = tl.where(score != score, 0x7FFFFFFF, rank).to(tl.int64)
    return tl.where(position < seen, rank, -0x80000001)


@triton.jit
def _find_least(scores_ptr, seen, TOP_K: tl.constexpr, BLOCK: tl.constexpr):
    """Return the rank of the last score that is chosen, and how many scores have more.

    A pass over all scores counts what three ranks would choose, which settles two bits; the search
    ends early where a rank chooses just as many as there are to choose.
    """
    least, step = tl.full((), -0x80000000, tl.int64), tl.full((), 0x40000000, tl.int64)
    chosen = seen  # of least
    while (step > 0) & (chosen > TOP_K):
        low, middle, high = 0, 0, 0
        for base in range(0, seen, BLOCK):
            rank = _load_ranks(scores_ptr, base + tl.arange(0, BLOCK), seen)
            low += tl.sum((rank >= least + step).to(tl.int32), axis=0)
            middle += tl.sum((rank >= least + 2 * step).to(tl.int32), axis=0)
            high += tl.sum((rank >= least + 3 * step).to(tl.int32), axis=0)
        if high >= TOP_K:
            least, chosen = least + 3 * step, high
        elif middle >= TOP_K:
            least, chosen = least + 2 * step, middle
        elif low >= TOP_K:
            least, chosen = least + step, low
        step = step // 4
    return least, chosen


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
    """Find the rank of the last score that is chosen, then write down positions."""
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
    least, chosen = _find_least(scores_ptr, seen, TOP_K, BLOCK)
    # The lowest positions win among those with the least rank, of which there may be too many.
    excess, taken, tied = chosen - TOP_K, 0, 0
    ties = TOP_K
    if excess > 0:
        for base in range(0, seen, BLOCK):
            rank = _load_ranks(scores_ptr, base + steps, seen)
            ties -= tl.sum((rank > least).to(tl.int32), axis=0)
    for base in range(0, seen, BLOCK):
        rank = _load_ranks(scores_ptr, base + steps, seen)
        is_tie = ((rank == least) & (excess > 0)).to(tl.int32)
        before = tied + tl.cumsum(is_tie, axis=0) - is_tie
        take = ((rank >= least) & ((is_tie == 0) | (before < ties))).to(tl.int32)
        place = taken + tl.cumsum(take, axis=0) - take
        tl.store(to + place, base + steps, mask=take > 0)
        taken += tl.sum(take, axis=0)
        tied += tl.sum(is_tie, axis=0)


def choose(q: Tensor, weights: Tensor, pages: Tensor, rows: AttentionRows, top_k: int) -> Tensor:
    """Choose as latent_choice_reference does. What lies behind what a token sees is undefined."""
    tokens = len(q)
    check(q, pages, rows)
    assert weights.dtype is torch.float32
    assert weights.is_contiguous()
    width, num_rows = rows.block_tables.shape[1], len(rows.start)
    limit = width * pages.shape[1]
    # Ranks compare all of it.
    chosen = torch.zeros(tokens, top_k, dtype=torch.int32, device=q.device)
    at_once = min(tokens, max(1, _MAX_SCORES // (4 * limit)))
    scores, shape = torch.empty(at_once, limit, device=q.device), _shape(q, pages, top_k)
    block = min(_SOUGHT, max(1024, triton.next_power_of_2(limit)))
    for first in range(0, tokens, at_once):
        end = min(first + at_once, tokens)
        _score_positions_kernel[(min(PROGRAMS, (end - first) * triton.cdiv(limit, SPLIT)),)](
            scores,
            q,
            weights,
            pages,
            *rows[:4],
            first,
            end,
            num_rows,
            len(pages),
            width,
            C=shape,
            num_stages=1 if q.dtype is torch.float32 else 3,
            enable_fp_fusion=False,
        )
        _choose(chosen, scores, rows, first, end, top_k, block)
    return chosen


def _choose(
    chosen: Tensor,
    scores: Tensor,
    rows: AttentionRows,
    first: int,
    end: int,
    top_k: int,
    block: int,
) -> None:
    _choose_positions_kernel[(end - first,)](
        chosen,
        scores,
        rows.cu_rows,
        rows.start,
        first,
        len(rows.start),
        scores.shape[1],
        TOP_K=top_k,
        BLOCK=block,
        num_warps=min(16, block // 256),
    )


def _shape(q: Tensor, pages: Tensor, top_k: int) -> Shape:
    _, heads, dim = q.shape
    return Shape(
        H=heads,
        D=dim,
        TOP_K=top_k,
        BLOCK_SIZE=pages.shape[1],
        BLOCK_H=max(16, triton.next_power_of_2(heads)),
        BLOCK_D=max(16, triton.next_power_of_2(dim)),
        POSITIONS=_SCORED,
        SPLIT=SPLIT,
        **arithmetic(q),
    )
