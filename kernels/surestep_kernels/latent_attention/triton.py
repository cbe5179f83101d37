"""Latent attention in Triton; latent_choice.py chooses the positions that it reads.

Simple rather than fast, and not timed on a GPU yet: a program has one token and a tile of its
heads, and goes through the positions in order (online softmax, Milakov and Gimelshein, 2018), so
that a long context keeps few programs busy.

A token is alone in its arithmetic, and its positions are cut into blocks from the first one on: its
bits do not depend on its neighbours or on the window that it is in.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from surestep_kernels.columns.gpu.dependent_launch import DependentKernel, wait_for_earlier_kernels
from surestep_kernels.paged_attention import AttentionRows
from surestep_kernels.paged_attention.tile import LOG2_E
from surestep_kernels.store_kv import FP8

_HEADS = 16  # of a tile: the fewest that tensor cores multiply
_POSITIONS = 32  # of a step
_ROWS = tl.constexpr(256)  # processed together


@triton.jit
def seen_by(token, cu_rows_ptr, start_ptr, num_rows):
    """Return a token's row, and how many positions it may see: none if it is of no row."""
    row = 0
    for base in range(0, num_rows, _ROWS):
        number = base + tl.arange(0, _ROWS)
        end = tl.load(cu_rows_ptr + 1 + number, mask=number < num_rows, other=2147483647)
        row += tl.sum((end <= token).to(tl.int32), axis=0)
    is_used = row < num_rows
    begin = tl.load(cu_rows_ptr + row, mask=is_used, other=0)
    start = tl.load(start_ptr + row, mask=is_used, other=0)
    return row, tl.where(is_used, start + token - begin + 1, 0)


@triton.jit
def lines_of(position, used, table_ptr, num_blocks, BLOCK_SIZE: tl.constexpr):
    """Return where pages hold these positions, and which of them they hold."""
    page = tl.load(table_ptr + position // BLOCK_SIZE, mask=used, other=-1).to(tl.int64)
    used = used & (page >= 0) & (page < num_blocks)
    return page * BLOCK_SIZE + position % BLOCK_SIZE, used


@triton.jit
def multiply(a, b, acc, PRECISION: tl.constexpr, WIDEN: tl.constexpr):
    if WIDEN:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision=PRECISION)


@triton.jit
def load_part(base_ptr, line, used, D, first, last, BLOCK: tl.constexpr):
    """Load elements first..last of lines [N]: [N, BLOCK], 0 where there are none."""
    dims = first + tl.arange(0, BLOCK)
    mask = used[:, None] & (dims < last)[None, :]
    return tl.load(base_ptr + line[:, None] * D + dims[None, :], mask=mask, other=0.0)


@DependentKernel
@triton.jit(do_not_specialize=["num_rows", "num_blocks", "table_width"])
def _attend_latents_kernel(
    out_ptr,  # [T, H, V]
    q_ptr,  # [T, H, D]
    pages_ptr,  # [blocks, BLOCK_SIZE, D]
    tables_ptr,  # i32[S, table_width]
    slots_ptr,  # i64[R]
    cu_rows_ptr,  # i32[R+1]
    start_ptr,  # i32[R]
    chosen_ptr,  # i32[T, TOP_K]; TOP_K > 0 only
    scale,  # of scores, times log2(e)
    num_rows,
    num_blocks,
    table_width,
    H: tl.constexpr,
    D: tl.constexpr,
    V: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_R: tl.constexpr,  # of what is no value
    HEADS: tl.constexpr,
    POSITIONS: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDEN: tl.constexpr,  # for Triton's interpreter, which cannot multiply bfloat16
):
    wait_for_earlier_kernels()
    token = tl.program_id(0)
    row, seen = seen_by(token, cu_rows_ptr, start_ptr, num_rows)
    if seen == 0:
        return
    table_ptr = tables_ptr + tl.load(slots_ptr + row) * table_width
    count = tl.minimum(seen, TOP_K if TOP_K else table_width * BLOCK_SIZE)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    flat = token.to(tl.int64) * H + head
    q_value = load_part(q_ptr, flat, head < H, D, 0, V, BLOCK_V)
    q_rest = load_part(q_ptr, flat, head < H, D, V, D, BLOCK_R)
    top = tl.full((HEADS,), float("-inf"), tl.float32)
    total, acc = tl.zeros((HEADS,), tl.float32), tl.zeros((HEADS, BLOCK_V), tl.float32)
    for base in range(0, count, POSITIONS):
        position = base + tl.arange(0, POSITIONS)
        used = position < count
        if TOP_K:
            at = chosen_ptr + token.to(tl.int64) * TOP_K + position
            position = tl.load(at, mask=used, other=0)
        line, held = lines_of(position, used, table_ptr, num_blocks, BLOCK_SIZE)
        value = load_part(pages_ptr, line, held, D, 0, V, BLOCK_V).to(q_value.dtype)
        rest = load_part(pages_ptr, line, held, D, V, D, BLOCK_R).to(q_value.dtype)
        scores = tl.zeros((HEADS, POSITIONS), tl.float32)
        scores = multiply(q_value, tl.trans(value), scores, PRECISION, WIDEN)
        scores = multiply(q_rest, tl.trans(rest), scores, PRECISION, WIDEN)
        scores = tl.where(used[None, :], scores * scale, float("-inf"))
        peak = tl.maximum(top, tl.max(scores, axis=1))
        weights, decay = tl.exp2(scores - peak[:, None]), tl.exp2(top - peak)
        total = total * decay + tl.sum(weights, axis=1)
        acc = multiply(weights.to(value.dtype), value, acc * decay[:, None], PRECISION, WIDEN)
        top = peak
    dims = tl.arange(0, BLOCK_V)
    mask = (head < H)[:, None] & (dims < V)[None, :]
    made = (acc / total[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + flat[:, None] * V + dims[None, :], made, mask=mask)


def attend(
    q: Tensor,
    pages: Tensor,
    rows: AttentionRows,
    scale: float,
    value_width: int,
    chosen: Tensor | None = None,
) -> Tensor:
    """Attend as attend_reference does. Outputs of tokens of no row are left as they are."""
    tokens, heads, dim = q.shape
    check(q, pages, rows)
    assert chosen is None or (chosen.dtype is torch.int32 and chosen.is_contiguous())
    out = torch.empty(tokens, heads, value_width, dtype=q.dtype, device=q.device)
    if tokens:
        _attend_latents_kernel[(tokens, triton.cdiv(heads, _HEADS))](
            out,
            q,
            pages,
            *rows[:4],
            chosen,
            scale * LOG2_E.value,
            len(rows.start),
            len(pages),
            rows.block_tables.shape[1],
            H=heads,
            D=dim,
            V=value_width,
            TOP_K=0 if chosen is None else chosen.shape[1],
            BLOCK_SIZE=pages.shape[1],
            BLOCK_V=max(16, triton.next_power_of_2(value_width)),
            BLOCK_R=max(16, triton.next_power_of_2(dim - value_width)),
            HEADS=_HEADS,
            POSITIONS=_POSITIONS,
            **arithmetic(q),
            num_warps=8,
            num_stages=1,
            enable_fp_fusion=False,
        )
    return out


def arithmetic(q: Tensor) -> dict[str, str | bool]:
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
