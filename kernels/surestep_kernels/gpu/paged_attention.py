"""Paged attention in Triton: decode rows, windows of drafts and prompts in one ragged batch.

It has only run in Triton's interpreter, on the CPU (tests/kernels). It compiles for sm_90 but has
never run on a GPU, nor been measured.

A program attends a tile of BLOCK_M queries, the tokens of one row times the heads of one group, so
that all of them share the loads. Positions are cut into splits at multiples of SPLIT and these into
blocks of BLOCK_N: an online softmax (Milakov and Gimelshein, 2018) runs over the blocks of a split
as in FlashAttention (Dao et al., 2022), and the splits are merged in order of position. Where
there are too few tiles to fill a GPU, each split is a program of its own, and a second kernel does
the merging (Flash-Decoding, Dao et al., 2023); else the same program goes through all of them.

So the arithmetic of a query follows from its position alone: not from its neighbours, its place in
the row, the number of splits or where they are merged. Tiles have one shape for decode rows,
windows and prompts, because the order in which a product is summed follows the tile's shape; and
the compiler may not fuse a product with a sum on its own (enable_fp_fusion).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from surestep_kernels.kv_cache import FP8, LayerCache
from surestep_kernels.paged_attention import AttentionRows

from .attention_tile import (
    LOG2_E,
    Pages,
    Shape,
    attend_split,
    find_row,
    finish,
    load_queries,
    merge,
    nothing,
    see,
)

_WIDE_TILE = 64  # queries: the least that fills the wide tensor core instruction of sm_90
_FP32_TILE = 16  # fp32 is multiplied without tensor cores
SPLIT = 256  # KV positions
_MIN_PROGRAMS = 264  # two for each multiprocessor of an H100: with fewer tiles, splits are spread
_MAX_SCRATCH = 256 << 20  # bytes for what the splits add up to


@triton.jit(do_not_specialize=["num_rows", "table_width", "num_splits"])
def _attend_kernel(
    out_ptr,  # [T, Hq, D]
    sums_ptr,  # f32[T, Hq, S, D] acc of each split; ONE_SPLIT only
    stats_ptr,  # f32[T, Hq, S, 2] its m and total
    q_ptr,  # [T, Hq, D] with a stride from token to token
    k_ptr,  # [blocks, Hkv, block_size, D]
    v_ptr,
    scales_ptr,  # f32[2]; HAS_SCALES only
    sinks_ptr,  # f32[Hq]; HAS_SINKS only
    tables_ptr,  # i32[R, table_width]
    cu_rows_ptr,  # i32[R+1]
    start_ptr,  # i32[R]
    scale,  # of the scores, times log2(e)
    num_rows,
    num_blocks,
    table_width,
    num_splits,  # S
    q_stride,
    C: tl.constexpr,
    ONE_TILE: tl.constexpr,  # for each row
    ONE_SPLIT: tl.constexpr,  # for each program
):
    TOKENS: tl.constexpr = C.BLOCK_M // C.GROUP
    tile, kv_head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    row = tile if ONE_TILE else find_row(cu_rows_ptr, num_rows, tile, TOKENS)
    row_begin, start = tl.load(cu_rows_ptr + row), tl.load(start_ptr + row)
    count = tl.load(cu_rows_ptr + row + 1) - row_begin
    index = 0 if ONE_TILE else (tile - row_begin // TOKENS - row) * TOKENS
    if index >= count:
        return
    queries = load_queries(q_ptr, q_stride, row_begin, start, index, count, C)
    limit, head_offset = table_width * C.BLOCK_SIZE, kv_head * (C.BLOCK_SIZE * C.D)
    table = tables_ptr + row.to(tl.int64) * table_width
    pages = Pages(k_ptr + head_offset, v_ptr + head_offset, table, num_blocks)
    seen = see(start + index, tl.minimum(TOKENS, count - index), limit, C)
    first, end = seen.begin // C.SPLIT, tl.cdiv(seen.end, C.SPLIT)
    dims = tl.arange(0, C.BLOCK_D)
    mask = queries.is_own[:, None] & (dims < C.D)[None, :]
    if C.HAS_SCALES:
        scale = scale * tl.load(scales_ptr)
    if ONE_SPLIT:
        if first + tl.program_id(2) >= end:
            return
        m, total, acc = attend_split(queries, pages, seen, scale, first + tl.program_id(2), C)
        to = queries.line * num_splits + tl.program_id(2)
        tl.store(stats_ptr + to * 2, m, mask=queries.is_own)
        tl.store(stats_ptr + to * 2 + 1, total, mask=queries.is_own)
        tl.store(sums_ptr + to[:, None] * C.D + dims[None, :], acc, mask=mask)
    else:
        m, total, acc = nothing(C.BLOCK_M, C)
        for split in range(first, end):
            part_m, part_total, part = attend_split(queries, pages, seen, scale, split, C)
            m, total, acc = merge(m, total, acc, part_m, part_total, part)
        out = finish(m, total, acc, queries.head, sinks_ptr, scales_ptr, C)
        to = queries.line[:, None] * C.D + dims[None, :]
        tl.store(out_ptr + to, out.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_rows", "table_width", "num_splits"])
def _merge_kernel(
    out_ptr,  # [T, Hq, D]
    sums_ptr,  # f32[T, Hq, S, D]
    stats_ptr,  # f32[T, Hq, S, 2]
    scales_ptr,
    sinks_ptr,
    cu_rows_ptr,  # i32[R+1]
    start_ptr,  # i32[R]
    num_rows,
    table_width,
    num_splits,  # S
    C: tl.constexpr,
    BLOCK_G: tl.constexpr,  # GROUP, or the next power of two
    UNROLL: tl.constexpr,  # splits whose loads are under way together
):
    """The queries of one token and KV head from their splits: as in _attend_kernel, bit for bit."""
    TOKENS: tl.constexpr = C.BLOCK_M // C.GROUP
    token, member = tl.program_id(0), tl.arange(0, BLOCK_G)
    head, is_head = tl.program_id(1) * C.GROUP + member, member < C.GROUP
    row = find_row(cu_rows_ptr, num_rows, token, 0)
    row_begin, start = tl.load(cu_rows_ptr + row), tl.load(start_ptr + row)
    count = tl.load(cu_rows_ptr + row + 1) - row_begin
    if token - row_begin >= count:
        return
    index = (token - row_begin) // TOKENS * TOKENS  # of the tile's first token
    tokens, limit = tl.minimum(TOKENS, count - index), table_width * C.BLOCK_SIZE
    seen = see(start + index, tokens, limit, C)
    splits = tl.cdiv(seen.end, C.SPLIT) - seen.begin // C.SPLIT
    line = token.to(tl.int64) * (C.KV_HEADS * C.GROUP) + head
    dims = tl.arange(0, C.BLOCK_D)[None, :]
    mask = is_head[:, None] & (dims < C.D)
    m, total, acc = nothing(BLOCK_G, C)
    for base in range(0, splits, UNROLL):
        for i in tl.static_range(UNROLL):
            split = tl.full((BLOCK_G,), base + i, tl.int32)
            at, used = line * num_splits + split, is_head & (split < splits)
            part_m = tl.load(stats_ptr + at * 2, mask=used, other=float("-inf"))
            part_total = tl.load(stats_ptr + at * 2 + 1, mask=used, other=0.0)
            part_at, part_mask = sums_ptr + at[:, None] * C.D + dims, used[:, None] & (dims < C.D)
            part = tl.load(part_at, mask=part_mask, other=0.0)
            m, total, acc = merge(m, total, acc, part_m, part_total, part)
    head = tl.minimum(head, C.KV_HEADS * C.GROUP - 1)
    out = finish(m, total, acc, head, sinks_ptr, scales_ptr, C)
    tl.store(out_ptr + line[:, None] * C.D + dims, out.to(out_ptr.dtype.element_ty), mask=mask)


def paged_attention(
    q: Tensor,
    cache: LayerCache,
    rows: AttentionRows,
    scale: float,
    *,
    window: int = 0,
    sinks: Tensor | None = None,
) -> Tensor:
    """See paged_attention_reference. q may be a slice of a projection.

    Pages that a table names but the cache does not have are zeros, and so is what lies behind the
    table. Tokens that belong to no row are left as they are.
    """
    _check(q, cache, rows, sinks)
    shape, grid = _shape(q, cache, window, sinks is not None), _grid(q, cache, rows, window)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if len(q) == 0:
        return out
    splits = grid.splits if grid.one_split else 0
    sums = torch.empty(*q.shape[:2], splits, q.shape[2], dtype=torch.float32, device=q.device)
    stats = torch.empty(*q.shape[:2], splits, 2, dtype=torch.float32, device=q.device)
    width = rows.block_tables.shape[1]
    _attend_kernel[(grid.tiles, shape.KV_HEADS, max(splits, 1))](
        *(out, sums, stats, q, cache.k, cache.v, cache.scales, sinks, *rows[:3]),
        *(scale * LOG2_E.value, len(rows.start), len(cache.k), width, splits, q.stride(0)),
        C=shape,
        ONE_TILE=grid.one_tile,
        ONE_SPLIT=grid.one_split,
        num_warps=8 if shape.BLOCK_D > 64 else 4,  # for all rows alike; 4 would spill
        num_stages=2 if q.dtype is torch.float32 else 3,
        enable_fp_fusion=False,
    )
    if grid.one_split:
        _merge_kernel[(len(q), shape.KV_HEADS)](
            *(out, sums, stats, cache.scales, sinks, rows.cu_rows, rows.start),
            *(len(rows.start), width, splits),
            C=shape,
            BLOCK_G=triton.next_power_of_2(shape.GROUP),
            UNROLL=4,
            enable_fp_fusion=False,
        )
    return out


class _Grid(NamedTuple):
    """How the work is cut into programs: of no influence on the result."""

    tiles: int
    one_tile: bool  # for each row
    splits: int  # at most, of a tile
    one_split: bool  # for each program


def _grid(q: Tensor, cache: LayerCache, rows: AttentionRows, window: int) -> _Grid:
    """From numbers of the host alone."""
    tokens, heads, head_dim = q.shape
    _, kv_heads, block_size, _ = cache.k.shape
    group = heads // kv_heads
    tile_tokens = block_m(q.dtype, group) // group
    one_tile = rows.max_tokens <= tile_tokens
    tiles = len(rows.start) + (0 if one_tile else tokens // tile_tokens)
    splits = triton.cdiv(rows.block_tables.shape[1] * block_size, SPLIT)
    if window:
        splits = min(splits, triton.cdiv(window + tile_tokens - 1, SPLIT) + 1)
    scratch = tokens * heads * splits * (head_dim + 2) * 4
    one_split = splits > 1 and tiles * kv_heads < _MIN_PROGRAMS and scratch <= _MAX_SCRATCH
    return _Grid(tiles, one_tile, splits, one_split)


def block_m(dtype: torch.dtype, group: int) -> int:
    """Queries of a tile: whatever the batch, because bits follow from the tile's shape."""
    least = _FP32_TILE if dtype is torch.float32 else _WIDE_TILE
    return max(least, 1 << (group - 1).bit_length())


def _shape(q: Tensor, cache: LayerCache, window: int, has_sinks: bool) -> Shape:
    _, kv_heads, block_size, head_dim = cache.k.shape
    block_d = max(16, triton.next_power_of_2(head_dim))
    return Shape(
        KV_HEADS=kv_heads,
        GROUP=q.shape[1] // kv_heads,
        D=head_dim,
        BLOCK_D=block_d,
        BLOCK_M=block_m(q.dtype, q.shape[1] // kv_heads),
        BLOCK_N=64 if block_d * q.itemsize <= 256 else 32,
        BLOCK_SIZE=block_size,
        SPLIT=SPLIT,
        WINDOW=window,
        HAS_SCALES=cache.scales is not None,
        HAS_SINKS=has_sinks,
        PRECISION="ieee" if q.dtype is torch.float32 else "tf32",
        WIDEN=triton.knobs.runtime.interpret,
    )


def _check(q: Tensor, cache: LayerCache, rows: AttentionRows, sinks: Tensor | None) -> None:
    _, heads, head_dim = q.shape
    _, kv_heads, _, cache_dim = cache.k.shape
    assert heads % kv_heads == 0
    assert head_dim == cache_dim
    assert q.stride()[1:] == (head_dim, 1)
    assert cache.k.shape == cache.v.shape
    assert cache.k.dtype is cache.v.dtype
    assert cache.k.dtype in (q.dtype, FP8)
    assert cache.k.is_contiguous()
    assert cache.v.is_contiguous()
    assert rows.block_tables.dtype is rows.cu_rows.dtype is rows.start.dtype is torch.int32
    assert rows.block_tables.is_contiguous()
    assert len(rows.block_tables) == len(rows.start) == len(rows.cu_rows) - 1
    assert sinks is None or (sinks.shape == (heads,) and sinks.dtype is torch.float32)
