"""Paged attention in Triton: decode rows, windows of drafts and prompts in one ragged batch.

A program attends with a tile of BLOCK_M queries, the tokens of one row times the heads of one
group, so that all of them share the loads. Positions are cut into splits at multiples of SPLIT and
these into blocks of BLOCK_N: an online softmax (Milakov and Gimelshein, 2018) runs over the blocks
of a split as in FlashAttention (Dao et al., 2022), and the splits are merged in order of position.

The splits of rows that fit into one tile are counted on the device, over all rows, and divided
equally among programs whose number the host fixes: so as many programs work on one long row as on
many short ones, and none works on what does not exist. They store the state of each split, and a
second kernel merges them (Flash-Decoding, Dao et al., 2023). Longer rows have a program for each
tile, which goes through all splits and merges them itself.

So the arithmetic of a query follows from its position alone: not from its neighbours, its place in
the row, the number of splits or where they are merged. Tiles have one shape for decode rows,
windows and prompts, because the order in which a product is summed follows the tile's shape; and
the compiler may not fuse a product with a sum on its own (enable_fp_fusion).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from surestep_kernels.columns.gpu.dependent_launch import DependentKernel, wait_for_earlier_kernels
from surestep_kernels.store_kv import FP8, LayerCache

from .grid import SPLIT, Batch, grid_of
from .reference import AttentionRows
from .tile import LOG2_E, Pages, Shape, attend_split, empty_state, finish, merge
from .work import Inputs, Rows, count_units, find_unit, first_line, load_row, load_tile, splits_of

_WIDE_TILE = 64  # queries: the fewest that fill the wide tensor core instruction of sm_90
_FP32_TILE = 16  # fp32 is multiplied without tensor cores
_UNROLL = 16  # splits whose sums are read together


@DependentKernel
@triton.jit(do_not_specialize=["num_rows", "table_width", "num_shares", "num_lines"])
def _attend_kernel(
    out_ptr,  # [T, Hq, D]
    sums_ptr,  # f32[Hkv, L, GROUP, D] acc of a token over a split
    stats_ptr,  # f32[Hkv, L, GROUP, 2] its m and total
    q_ptr,  # [T, Hq, D] with a stride from token to token
    k_ptr,  # [blocks, Hkv, block_size, D]
    v_ptr,
    scales_ptr,  # f32[2]; HAS_SCALES only
    sinks_ptr,  # f32[Hq]; HAS_SINKS only
    tables_ptr,  # i32[S, table_width]
    slots_ptr,  # i64[R]
    cu_rows_ptr,  # i32[R+1]
    start_ptr,  # i32[R]
    wider_ptr,  # i32[R]; HAS_WIDER only
    scale,  # of the scores, times log2(e)
    num_rows,
    num_blocks,
    table_width,
    num_shares,  # per KV head, among which splits are divided
    num_lines,  # of scratch
    q_stride,
    C: tl.constexpr,
    HAS_LONG: tl.constexpr,  # whether some rows may be long, or too many for scratch
):
    wait_for_earlier_kernels()
    program, kv_head = tl.program_id(0) // C.KV_HEADS, tl.program_id(0) % C.KV_HEADS
    limit = table_width * C.BLOCK_SIZE
    rows = Rows(cu_rows_ptr, start_ptr, wider_ptr, num_rows, limit, num_lines)
    offset = kv_head.to(tl.int64) * (C.BLOCK_SIZE * C.D)
    pages = Pages(k_ptr + offset, v_ptr + offset, tables_ptr, num_blocks)
    inputs = Inputs(rows, pages, slots_ptr, q_ptr, q_stride, kv_head)
    if C.HAS_SCALES:
        scale = scale * tl.load(scales_ptr)
    if program < num_shares:
        _attend_share(sums_ptr, stats_ptr, inputs, scale, program, num_shares, C)
    if HAS_LONG:
        programs = tl.num_programs(0) // C.KV_HEADS
        tiles = count_units(rows, C, True)
        # Programs without a share come first.
        for tile in range((program - num_shares + programs) % programs, tiles, programs):
            # The last tiles of a row see most, so they come first.
            place = find_unit(rows, tiles - 1 - tile, C, True)
            _attend_tile(out_ptr, scales_ptr, sinks_ptr, inputs, scale, place, C)


@triton.jit
def _attend_share(sums_ptr, stats_ptr, inputs, scale, share, num_shares, C: tl.constexpr):
    """Attend an equal share of all splits of rows that are not long; store each split's state."""
    rows, dims = inputs.rows, tl.arange(0, C.BLOCK_D)[None, :]
    member = tl.arange(0, C.BLOCK_M)
    base = inputs.kv_head.to(tl.int64) * rows.lines
    units = count_units(rows, C, False).to(tl.int64)
    at = (units * share // num_shares).to(tl.int32)
    end = (units * (share + 1) // num_shares).to(tl.int32)
    while at < end:
        place = find_unit(rows, at, C, False)
        row = load_row(rows, place.row, True, C)
        queries, pages, seen = load_tile(inputs, place.row, 0, C)
        first, splits = splits_of(rows, row, C)
        behind = tl.minimum(splits, place.unit + end - at)
        for split in range(place.unit, behind):
            m, total, acc = attend_split(queries, pages, seen, scale, first + split, C)
            to = (base + place.line + split * row.count) * C.GROUP
            stats, sums = stats_ptr + to * 2, sums_ptr + to * C.D
            tl.store(stats + member * 2, m, mask=member < queries.own)
            tl.store(stats + member * 2 + 1, total, mask=member < queries.own)
            mask = (member < queries.own)[:, None] & (dims < C.D)
            tl.store(sums + member[:, None] * C.D + dims, acc, mask=mask)
        at += behind - place.unit


@triton.jit
def _attend_tile(out_ptr, scales_ptr, sinks_ptr, inputs, scale, place, C: tl.constexpr):
    """Attend all splits of a tile."""
    member, dims = tl.arange(0, C.BLOCK_M), tl.arange(0, C.BLOCK_D)[None, :]
    index = place.unit * (C.BLOCK_M // C.GROUP)
    queries, pages, seen = load_tile(inputs, place.row, index, C)
    m, total, acc = empty_state(C.BLOCK_M, C)
    for split in range(seen.begin // C.SPLIT, tl.cdiv(seen.end, C.SPLIT)):
        part_m, part_total, part = attend_split(queries, pages, seen, scale, split, C)
        m, total, acc = merge(m, total, acc, part_m, part_total, part)
    head = inputs.kv_head * C.GROUP
    out = finish(m, total, acc, head + member % C.GROUP, sinks_ptr, scales_ptr, C)
    to = out_ptr + (queries.token * (C.KV_HEADS * C.GROUP) + head) * C.D
    of = member // C.GROUP * (C.KV_HEADS * C.GROUP) + member % C.GROUP
    mask = (member < queries.own)[:, None] & (dims < C.D)
    tl.store(to + of[:, None] * C.D + dims, out.to(out_ptr.dtype.element_ty), mask=mask)


@DependentKernel
@triton.jit(do_not_specialize=["num_rows", "table_width", "num_lines", "max_tokens"])
def _merge_kernel(
    out_ptr,  # [T, Hq, D]
    sums_ptr,  # see _attend_kernel
    stats_ptr,
    scales_ptr,
    sinks_ptr,
    cu_rows_ptr,  # i32[R+1]
    start_ptr,  # i32[R]
    wider_ptr,  # i32[R]; HAS_WIDER only
    num_rows,
    table_width,
    num_lines,
    max_tokens,  # of a row that is not long
    C: tl.constexpr,
    UNROLL: tl.constexpr,  # splits whose loads are in flight together
):
    """Merge the splits of a query exactly as a long row's program does, bit for bit."""
    wait_for_earlier_kernels()
    limit = table_width * C.BLOCK_SIZE
    rows = Rows(cu_rows_ptr, start_ptr, wider_ptr, num_rows, limit, num_lines)
    number, index = tl.program_id(0) // max_tokens, tl.program_id(0) % max_tokens
    row, head = load_row(rows, number, True, C), tl.program_id(1) + tl.arange(0, 1)
    lines = (head // C.GROUP).to(tl.int64) * num_lines  # of other KV heads
    if (index >= row.count) | (row.count > C.BLOCK_M // C.GROUP):
        return
    splits, line = splits_of(rows, row, C)[1], first_line(rows, number, C)
    if line + splits * row.count > num_lines:
        return
    line += index
    dims = tl.arange(0, C.BLOCK_D)[None, :]
    m, total, acc = empty_state(1, C)
    for base in range(0, splits, UNROLL):
        parts = ()
        for i in tl.static_range(UNROLL):
            used = tl.full((1,), base + i, tl.int32) < splits
            at = (lines + line + (base + i) * row.count) * C.GROUP + head % C.GROUP
            part_m = tl.load(stats_ptr + at * 2, mask=used, other=float("-inf"))
            part_total = tl.load(stats_ptr + at * 2 + 1, mask=used, other=0.0)
            part_at, part_mask = sums_ptr + at[:, None] * C.D + dims, used[:, None] & (dims < C.D)
            part = tl.load(part_at, mask=part_mask, other=0.0)
            parts += ((part_m, part_total, part),)  # type: ignore[assignment]  # it grows
        tl.debug_barrier()  # or the compiler moves most loads down to their first use
        for i in tl.static_range(UNROLL):
            m, total, acc = merge(m, total, acc, parts[i][0], parts[i][1], parts[i][2])
    out = finish(m, total, acc, head, sinks_ptr, scales_ptr, C)
    to = ((row.begin + index).to(tl.int64) * (C.KV_HEADS * C.GROUP) + head)[:, None] * C.D + dims
    tl.store(out_ptr + to, out.to(out_ptr.dtype.element_ty), mask=dims < C.D)


def paged_attention(
    q: Tensor,
    cache: LayerCache,
    rows: AttentionRows,
    scale: float,
    *,
    window: int = 0,
    sinks: Tensor | None = None,
    softcap: float = 0.0,
) -> Tensor:
    """Attend as paged_attention_reference does. q may be a slice of a projection.

    Pages that a table names but the cache does not have count as zeros, and so do those past the
    end of the table. Outputs of tokens that belong to no row are left as they are.
    """
    _check(q, cache, rows, sinks)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if len(q) == 0:
        return out
    has_wider = bool(window) and rows.wider is not None
    wider = rows.wider if has_wider else rows.start  # a pointer that is not read
    shape = _shape(q, cache, window, softcap, HAS_SINKS=sinks is not None, HAS_WIDER=has_wider)
    # The host does not know by how much windows are wider.
    batch = _batch(q, cache, rows, 0 if has_wider else window)
    grid = grid_of(batch)
    (attending, merging), width = grid.programs_of(batch), rows.block_tables.shape[1]
    sums, stats = _empty_sums(q, grid.lines)
    _attend_kernel[attending](
        out,
        sums,
        stats,
        q,
        cache.k,
        cache.v,
        cache.scales,
        sinks,
        *rows[:4],
        wider,
        scale * LOG2_E.value,
        len(rows.start),
        len(cache.k),
        width,
        grid.shares,
        grid.lines,
        q.stride(0),
        C=shape,
        HAS_LONG=grid.has_long,
        num_warps=_warps(shape, q.dtype),
        num_stages=2 if q.dtype is torch.float32 else 3,
        enable_fp_fusion=False,
    )
    _merge_kernel[merging](
        out,
        sums,
        stats,
        cache.scales,
        sinks,
        rows.cu_rows,
        rows.start,
        wider,
        len(rows.start),
        width,
        grid.lines,
        grid.merges // len(rows.start),
        C=shape,
        UNROLL=_UNROLL,
        num_warps=max(1, shape.BLOCK_D // 64),  # two elements of a thread
        enable_fp_fusion=False,
    )
    return out


def _empty_sums(q: Tensor, lines: int) -> tuple[Tensor, Tensor]:
    """Return the sums f32[lines, heads, D] of the splits, and their stats f32[lines, heads, 2]."""
    _, heads, head_dim = q.shape
    sums = torch.empty(lines, heads, head_dim, dtype=torch.float32, device=q.device)
    return sums, sums.new_empty(lines, heads, 2)


def _warps(shape: Shape, dtype: torch.dtype) -> int:
    """Return the warps of a program, for all rows alike.

    The wide instruction is one of four warps: of eight, the second group would repeat all that the
    first does with 64 queries. Four spill a little at heads of 128 and more, and are faster.
    """
    return 8 if dtype is torch.float32 and shape.BLOCK_D > 64 else 4


def block_m(dtype: torch.dtype, group: int) -> int:
    """Return the queries of a tile, the same for every batch, since bits follow from its shape."""
    least = _FP32_TILE if dtype is torch.float32 else _WIDE_TILE
    return max(least, 1 << (group - 1).bit_length())


def _batch(q: Tensor, cache: LayerCache, rows: AttentionRows, window: int) -> Batch:
    _, kv_heads, block_size, head_dim = cache.k.shape
    return Batch(
        tokens=len(q),
        rows=len(rows.start),
        max_tokens=rows.max_tokens,
        positions=rows.block_tables.shape[1] * block_size,
        heads=q.shape[1],
        kv_heads=kv_heads,
        head_dim=head_dim,
        window=window,
        tile=block_m(q.dtype, q.shape[1] // kv_heads),
    )


def _shape(q: Tensor, cache: LayerCache, window: int, softcap: float, **has: bool) -> Shape:
    _, kv_heads, block_size, head_dim = cache.k.shape
    block_d = max(16, triton.next_power_of_2(head_dim))
    block_n = 64 if block_d * q.itemsize <= 256 else 32
    is_aligned = block_n % block_size == 0 or block_size % block_n == 0
    return Shape(
        KV_HEADS=kv_heads,
        GROUP=q.shape[1] // kv_heads,
        D=head_dim,
        BLOCK_D=block_d,
        BLOCK_M=block_m(q.dtype, q.shape[1] // kv_heads),
        BLOCK_N=block_n,
        BLOCK_SIZE=block_size,
        PAGES=triton.cdiv(block_n, block_size) + (not is_aligned),
        SPLIT=SPLIT,
        WINDOW=window,
        SOFTCAP=softcap,
        HAS_SCALES=cache.scales is not None,
        **has,
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
    assert rows.slots.dtype is torch.int64
    assert rows.block_tables.is_contiguous()
    assert rows.wider is None or rows.wider.dtype is torch.int32
    assert len(rows.slots) == len(rows.start) == len(rows.cu_rows) - 1
    assert sinks is None or (sinks.shape == (heads,) and sinks.dtype is torch.float32)
