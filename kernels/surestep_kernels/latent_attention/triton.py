"""Latent attention in Triton; latent_choice/triton.py chooses the positions that it reads.

A program has one token and a tile of its heads. The positions of a token, or the list of those that
were chosen for it, are cut into splits of SPLIT from the first one on: an online softmax (Milakov
and Gimelshein, 2018) runs over the blocks of a split, and splits are merged in order of position.

The splits of rows of few tokens (windows) are counted on the device and divided equally among
programs whose number the host fixes (work.py); a second kernel merges them (Flash-Decoding, Dao et
al., 2023). Each token of a longer row has a program, which goes through all splits and merges them.

A token is alone in its arithmetic, which follows from its position: not from its neighbours, its
window, or where its splits are merged.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from surestep_kernels.columns.gpu.dependent_launch import DependentKernel, wait_for_earlier_kernels
from surestep_kernels.paged_attention import AttentionRows
from surestep_kernels.paged_attention.grid import MAX_SCRATCH, SPLIT
from surestep_kernels.paged_attention.tile import LOG2_E, merge, multiply
from surestep_kernels.store_kv import FP8

from .work import Rows, count_units, find_token, find_unit, first_unit, measure

_HEADS = 16  # of a tile: the fewest that Triton 3.6 multiplies by the wide instruction
_WINDOW = 16  # tokens of a row whose splits are units of work
_PROGRAMS = 2 * 132  # that share splits: two for each multiprocessor of an H100
_MERGED = 128  # elements of a head that a program merges
_UNROLL = 8  # splits whose sums are read together
_TWO = 164 * 1024  # bytes of shared memory that two steps in bfloat16 take

_VARYING = ["num_rows", "num_tokens", "num_blocks", "table_width"]
_VARYING += ["num_shares", "num_lines", "limit"]


class Shape(NamedTuple):
    """The constants that a kernel is compiled for."""

    H: int
    D: int  # of a latent
    V: int  # of a value, the latent's first part
    TOP_K: int  # positions that are chosen; 0: all are seen
    BLOCK_SIZE: int
    BLOCK_V: int
    BLOCK_R: int  # of what is no value
    HEADS: int  # of a tile
    POSITIONS: int  # of a step
    SPLIT: int
    WINDOW: int
    PRECISION: str
    WIDEN: bool  # for Triton's interpreter, which cannot multiply bfloat16


class Query(NamedTuple):
    """A token's queries of some heads, and where the positions are that it sees."""

    value: Any  # [HEADS, BLOCK_V]
    rest: Any  # [HEADS, BLOCK_R]
    seen: Any  # number of positions
    chosen: Any  # pointer; TOP_K > 0 only
    table: Any  # pointer


@triton.jit
def lines_of(position, used, table_ptr, num_blocks, BLOCK_SIZE: tl.constexpr):
    """Return where pages hold these positions, and which of them they hold."""
    page = tl.load(table_ptr + position // BLOCK_SIZE, mask=used, other=-1).to(tl.int64)
    used = used & (page >= 0) & (page < num_blocks)
    return page * BLOCK_SIZE + position % BLOCK_SIZE, used


@triton.jit
def load_part(
    base_ptr,
    line,
    used,
    D: tl.constexpr,
    first: tl.constexpr,
    last: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Load elements first..last of lines [N]: [N, BLOCK], 0 where there are none."""
    dims = first + tl.arange(0, BLOCK)
    mask = used[:, None]
    if last - first < BLOCK:
        mask = mask & (dims < last)[None, :]
    return tl.load(base_ptr + line[:, None] * D + dims[None, :], mask=mask, other=0.0)


@triton.jit
def _load_query(q_ptr, chosen_ptr, tables_ptr, slots_ptr, rows, row, token, C: tl.constexpr):
    begin, start = tl.load(rows.cu + row), tl.load(rows.start + row)
    seen = tl.minimum(start + token - begin + 1, rows.limit)
    head = tl.program_id(1) * C.HEADS + tl.arange(0, C.HEADS)
    flat = token.to(tl.int64) * C.H + head
    value = load_part(q_ptr, flat, head < C.H, C.D, 0, C.V, C.BLOCK_V)
    rest = load_part(q_ptr, flat, head < C.H, C.D, C.V, C.D, C.BLOCK_R)
    chosen = chosen_ptr + token.to(tl.int64) * C.TOP_K
    table = tables_ptr + tl.load(slots_ptr + row) * rows.width
    return Query(value, rest, seen, chosen, table)


@triton.jit
def _empty_state(D: tl.constexpr, M: tl.constexpr):
    """Return the top, total and acc of no positions."""
    top = tl.full((M,), float("-inf"), tl.float32)
    return top, tl.zeros((M,), tl.float32), tl.zeros((D, M), tl.float32)


@triton.jit
def _find_positions(of, base, end, C: tl.constexpr):
    """Return the positions i32[POSITIONS] of a step, -1 where there is none."""
    POSITIONS: tl.constexpr = C.POSITIONS  # Triton 3.6 does not accept a field in a shape
    index = base + tl.arange(0, POSITIONS)
    if C.TOP_K:
        return tl.load(of.chosen + index, mask=index < end, other=-1)
    return tl.where(index < end, index, -1)


@triton.jit
def _find_lines(position, of, num_blocks, C: tl.constexpr):
    return lines_of(position, position >= 0, of.table, num_blocks, C.BLOCK_SIZE)


@triton.jit
def _attend_split(of, pages_ptr, num_blocks, scale, split, C: tl.constexpr):
    """Return the greatest score, the sum of weights and that of weighted values of a split.

    Latents are the first operand of both products: there are enough of them for the wide
    instruction of sm_90, however few the heads, and both read one tile in shared memory.
    """
    HEADS: tl.constexpr = C.HEADS  # see _find_positions()
    POSITIONS: tl.constexpr = C.POSITIONS
    top, total, acc = _empty_state(C.BLOCK_V, C.HEADS)
    begin = split * C.SPLIT
    end = tl.minimum(begin + C.SPLIT, of.seen)
    # Positions are read two steps ahead, and what pages hold them one: no load waits for another.
    line, held = _find_lines(_find_positions(of, begin, end, C), of, num_blocks, C)
    ahead = _find_positions(of, begin + POSITIONS, end, C)
    for base in range(begin, end, POSITIONS):
        value = load_part(pages_ptr, line, held, C.D, 0, C.V, C.BLOCK_V).to(of.value.dtype)
        rest = load_part(pages_ptr, line, held, C.D, C.V, C.D, C.BLOCK_R).to(of.value.dtype)
        line, held = _find_lines(ahead, of, num_blocks, C)
        ahead = _find_positions(of, base + 2 * POSITIONS, end, C)
        used = base + tl.arange(0, POSITIONS) < end
        scores = tl.zeros((POSITIONS, HEADS), tl.float32)
        scores = multiply(rest, tl.trans(of.rest), scores, C)
        scores = multiply(value, tl.trans(of.value), scores, C)
        scores = tl.where(used[:, None], scores * scale, float("-inf"))
        peak = tl.maximum(top, tl.max(scores, axis=0))
        weights, decay = tl.exp2(scores - peak[None, :]), tl.exp2(top - peak)
        total = total * decay + tl.sum(weights, axis=0)
        weights, acc = weights.to(value.dtype), acc * decay[None, :]
        acc = multiply(tl.trans(value), weights, acc, C)
        top = peak
    return top, total, acc


@triton.jit
def _merge(top, total, acc, next_top, next_total, next_acc):
    """Merge the states of two ranges of positions, as merge() of paged attention does."""
    top, total, acc = merge(top, total, tl.trans(acc), next_top, next_total, tl.trans(next_acc))
    return top, total, tl.trans(acc)


@triton.jit
def _store_heads(to_ptr, line, of, C: tl.constexpr):
    """Store a value of each of a token's heads, f32[BLOCK_V, HEADS]; its first is `line`."""
    head, dims = tl.program_id(1) * C.HEADS + tl.arange(0, C.HEADS), tl.arange(0, C.BLOCK_V)
    mask = (dims < C.V)[:, None] & (head < C.H)[None, :]
    at = to_ptr + (line + head)[None, :] * C.V + dims[:, None]
    tl.store(at, of.to(to_ptr.dtype.element_ty), mask=mask)


@DependentKernel
@triton.jit(do_not_specialize=_VARYING)
def _attend_latents_kernel(
    out_ptr,  # [T, H, V]
    sums_ptr,  # f32[L, H, V] acc of a split
    stats_ptr,  # f32[L, H, 2] its top and total
    q_ptr,  # [T, H, D]
    pages_ptr,  # [blocks, BLOCK_SIZE, D]
    tables_ptr,  # i32[S, table_width]
    slots_ptr,  # i64[R]
    cu_rows_ptr,  # i32[R+1]
    start_ptr,  # i32[R]
    chosen_ptr,  # i32[T, TOP_K]; TOP_K > 0 only
    scale,  # of scores, times log2(e)
    num_rows,
    num_tokens,
    num_blocks,
    table_width,
    num_shares,  # programs among which splits are divided
    num_lines,  # L
    limit,  # positions of a token, at most
    C: tl.constexpr,
    HAS_LONG: tl.constexpr,  # whether some rows may be long, or too many for scratch
):
    wait_for_earlier_kernels()
    rows = Rows(cu_rows_ptr, start_ptr, num_rows, 0, num_tokens, table_width, limit, num_lines)
    program, member = tl.program_id(0), tl.program_id(1) * C.HEADS + tl.arange(0, C.HEADS)
    if program < num_shares:
        units = count_units(rows, C.SPLIT, 0, C.WINDOW).to(tl.int64)
        at = (units * program // num_shares).to(tl.int32)
        end = (units * (program + 1) // num_shares).to(tl.int32)
        while at < end:
            row, token, split, splits = find_unit(rows, at, C.SPLIT, 0, C.WINDOW)
            of = _load_query(q_ptr, chosen_ptr, tables_ptr, slots_ptr, rows, row, token, C)
            behind = tl.minimum(splits, split + end - at)
            for part in range(split, behind):
                top, total, acc = _attend_split(of, pages_ptr, num_blocks, scale, part, C)
                line = (at + part - split).to(tl.int64) * C.H
                tl.store(stats_ptr + (line + member) * 2, top, mask=member < C.H)
                tl.store(stats_ptr + (line + member) * 2 + 1, total, mask=member < C.H)
                _store_heads(sums_ptr, line, acc, C)
            at += behind - split
    elif HAS_LONG:
        # The last tokens of a row see most, so they come first.
        token = num_tokens - 1 - (program - num_shares)
        row, is_whole = find_token(rows, token, C.SPLIT, C.WINDOW)
        if is_whole:
            of = _load_query(q_ptr, chosen_ptr, tables_ptr, slots_ptr, rows, row, token, C)
            top, total, acc = _empty_state(C.BLOCK_V, C.HEADS)
            for split in range(tl.cdiv(of.seen, C.SPLIT)):
                part_top, part_total, part = _attend_split(
                    of, pages_ptr, num_blocks, scale, split, C
                )
                top, total, acc = _merge(top, total, acc, part_top, part_total, part)
            _store_heads(out_ptr, token.to(tl.int64) * C.H, acc / total[None, :], C)


@DependentKernel
@triton.jit(do_not_specialize=["num_rows", "num_tokens", "num_lines", "limit", "max_tokens"])
def _merge_latents_kernel(
    out_ptr,  # [T, H, V]
    sums_ptr,  # see _attend_latents_kernel
    stats_ptr,
    cu_rows_ptr,  # i32[R+1]
    start_ptr,  # i32[R]
    num_rows,
    num_tokens,
    num_lines,
    limit,
    max_tokens,  # of a row that is not long
    C: tl.constexpr,
    BLOCK: tl.constexpr,  # elements
    UNROLL: tl.constexpr,  # splits whose loads are in flight together
):
    """Merge a token's splits exactly as a long row's program does, bit for bit."""
    wait_for_earlier_kernels()
    rows = Rows(cu_rows_ptr, start_ptr, num_rows, 0, num_tokens, 0, limit, num_lines)
    number, index = tl.program_id(0) // max_tokens, tl.program_id(0) % max_tokens
    first, count, splits = measure(rows, number, True, C.SPLIT, 0, C.WINDOW)
    if (index >= count) | (splits == 0):
        return
    unit = first_unit(rows, number, C.SPLIT, 0, C.WINDOW)
    if unit + count * splits > num_lines:
        return
    unit += index * splits
    head = tl.program_id(1) + tl.arange(0, 1)
    dims = (tl.program_id(2) * BLOCK + tl.arange(0, BLOCK))[:, None]
    top, total, acc = _empty_state(BLOCK, 1)
    for base in range(0, splits, UNROLL):
        parts = ()
        for i in tl.static_range(UNROLL):
            used = tl.full((1,), base + i, tl.int32) < splits
            line = (unit + base + i).to(tl.int64) * C.H + head
            part_top = tl.load(stats_ptr + line * 2, mask=used, other=float("-inf"))
            part_total = tl.load(stats_ptr + line * 2 + 1, mask=used, other=0.0)
            mask = (dims < C.V) & used[None, :]
            part = tl.load(sums_ptr + line[None, :] * C.V + dims, mask=mask, other=0.0)
            parts += ((part_top, part_total, part),)  # type: ignore[assignment]  # it grows
        tl.debug_barrier()  # or the compiler moves most loads down to their first use
        for i in tl.static_range(UNROLL):
            top, total, acc = _merge(top, total, acc, parts[i][0], parts[i][1], parts[i][2])
    to = out_ptr + ((first + index).to(tl.int64) * C.H + head)[None, :] * C.V + dims
    tl.store(to, (acc / total[None, :]).to(out_ptr.dtype.element_ty), mask=dims < C.V)


def attend(
    q: Tensor,
    pages: Tensor,
    rows: AttentionRows,
    scale: float,
    value_width: int,
    chosen: Tensor | None = None,
) -> Tensor:
    """Attend as attend_reference does. Outputs of tokens of no row are left as they are."""
    tokens, heads, _ = q.shape
    check(q, pages, rows)
    assert chosen is None or (chosen.dtype is torch.int32 and chosen.is_contiguous())
    out = torch.empty(tokens, heads, value_width, dtype=q.dtype, device=q.device)
    if tokens == 0:
        return out
    shape = _shape(q, pages, value_width, 0 if chosen is None else chosen.shape[1])
    num_rows, width = len(rows.start), rows.block_tables.shape[1]
    limit = width * pages.shape[1] if chosen is None else min(width * pages.shape[1], shape.TOP_K)
    wanted = min(tokens, num_rows * _WINDOW) * triton.cdiv(limit, SPLIT)
    lines = min(wanted, MAX_SCRATCH // (4 * heads * (value_width + 2)))
    tiles = triton.cdiv(heads, shape.HEADS)
    shares = min(triton.cdiv(_PROGRAMS, tiles), wanted)
    has_long = rows.max_tokens > _WINDOW or lines < wanted
    sums = torch.empty(lines, heads, value_width, dtype=torch.float32, device=q.device)
    stats, most = sums.new_empty(lines, heads, 2), min(rows.max_tokens, _WINDOW)
    _attend_latents_kernel[(shares + tokens * has_long, tiles)](
        out,
        sums,
        stats,
        q,
        pages,
        *rows[:4],
        rows.cu_rows if chosen is None else chosen,  # not read
        scale * LOG2_E.value,
        num_rows,
        tokens,
        len(pages),
        width,
        shares,
        lines,
        limit,
        C=shape,
        HAS_LONG=has_long,
        num_warps=8,
        num_stages=_stages(q),
        enable_fp_fusion=False,
    )
    _merge_latents_kernel[(num_rows * most, heads, triton.cdiv(value_width, _MERGED))](
        out,
        sums,
        stats,
        rows.cu_rows,
        rows.start,
        num_rows,
        tokens,
        lines,
        limit,
        most,
        C=shape,
        BLOCK=_MERGED,
        UNROLL=_UNROLL,
        num_warps=1,
        enable_fp_fusion=False,
    )
    return out


def _stages(q: Tensor) -> int:
    """Return how many steps of positions, of 72 KiB in bfloat16, a program holds at once."""
    return 1 if q.dtype is torch.float32 or (q.is_cuda and _shared_memory(q.device) < _TWO) else 2


@cache
def _shared_memory(device: torch.device) -> int:
    """Return the most bytes that a program may have: 227 KiB on sm_90, and 99 KiB on sm_89."""
    properties = torch.cuda.get_device_properties(device)
    return int(properties.shared_memory_per_block_optin)  # type: ignore[attr-defined]  # stubs


def _shape(q: Tensor, pages: Tensor, value_width: int, top_k: int) -> Shape:
    _, heads, dim = q.shape
    return Shape(
        H=heads,
        D=dim,
        V=value_width,
        TOP_K=top_k,
        BLOCK_SIZE=pages.shape[1],
        BLOCK_V=max(16, triton.next_power_of_2(value_width)),
        BLOCK_R=max(16, triton.next_power_of_2(dim - value_width)),
        HEADS=_HEADS,
        POSITIONS=32 if q.dtype is torch.float32 else 64,
        SPLIT=SPLIT,
        WINDOW=_WINDOW,
        **arithmetic(q),
    )


def arithmetic(q: Tensor) -> dict[str, Any]:
    precision = "ieee" if q.dtype is torch.float32 else "tf32"
    return {"PRECISION": precision, "WIDEN": triton.knobs.runtime.interpret}


def check(q: Tensor, pages: Tensor, rows: AttentionRows) -> None:
    assert q.is_contiguous()
    assert pages.is_contiguous()
    assert pages.dtype in (q.dtype, FP8)
    assert pages.shape[2] == q.shape[2]
    assert rows.block_tables.dtype is rows.cu_rows.dtype is rows.start.dtype is torch.int32
    assert rows.slots.dtype is torch.int64
    assert rows.block_tables.is_contiguous()
    assert len(rows.slots) == len(rows.start) == len(rows.cu_rows) - 1
