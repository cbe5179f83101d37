"""The causal convolution of a gated delta layer.

A row reads one stream of lines: the inputs that its slot holds, up to the last pending one, then
its tokens. A token's output, a snapshot and the slot's new inputs are all consecutive lines of the
stream; they differ only in where they begin.

A slot's inputs are read and overwritten. Where one program has all tokens of a row it does both,
with a barrier in between; for longer rows a second launch writes the slot when every output is
done.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from surestep_kernels.columns.gpu.dependent_launch import DependentKernel, wait_for_earlier_kernels
from surestep_kernels.columns.gpu.recurrent_rows import (
    COLUMNS,
    row_pending,
    row_slot,
    row_snapshot,
    row_tokens,
)
from surestep_kernels.recurrent_rows import ConvState, RecurrentRows

_BLOCK_T, _BLOCK_C = 16, 128


@triton.jit
def _lines(inputs, tokens, x_stride, held, count, begin, at, columns, C):
    """Return lines `at` [L] of the stream, [L, columns]: `held` of the slot, then `count` tokens.

    Lines before `begin` are zero.
    """
    inside = (columns < C)[None, :]
    old, new = (at >= begin) & (at < held), (at >= held) & (at < held + count)
    from_slot = inputs + at[:, None] * C + columns[None, :]
    from_tokens = tokens + (at - held)[:, None] * x_stride + columns[None, :]
    before = tl.load(from_slot, mask=old[:, None] & inside, other=0.0)
    after = tl.load(from_tokens, mask=new[:, None] & inside, other=0.0)
    return tl.where((at < held)[:, None], before, after)


@triton.jit
def _silu(x, dtype: tl.constexpr):
    """Return silu of x rounded to dtype."""
    rounded = x.to(dtype).to(tl.float32)
    return (rounded / (1.0 + tl.exp(-rounded))).to(dtype)


@DependentKernel
@triton.jit(do_not_specialize_on_alignment=COLUMNS)
def _causal_conv_kernel(
    out_ptr,  # [T, C]
    x_ptr,  # [T, C], a line every x_stride elements
    weight_ptr,  # f32[TAPS, C]
    inputs_ptr,  # [S, TAPS - 1 + RECORDS, C]
    snapshots_ptr,  # [M, TAPS - 1, C]
    slots_ptr,  # i64[R]
    cu_rows_ptr,  # i32[R + 1]
    start_ptr,  # i32[R]
    pending_ptr,  # i32[R]
    window_ptr,  # i32[R]
    snapshot_after_ptr,  # i32[R]
    snapshot_line_ptr,  # i32[R]
    x_stride,
    C,
    num_slots,
    num_lines,
    TAPS: tl.constexpr,
    RECORDS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_C: tl.constexpr,
    OUTPUTS: tl.constexpr,
    ADVANCE: tl.constexpr,
):
    wait_for_earlier_kernels()
    row, KEEP = tl.program_id(0), TAPS - 1
    columns = tl.program_id(1).to(tl.int64) * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = (columns < C)[None, :]
    slot, known = row_slot(slots_ptr, row, num_slots)
    first, count = row_tokens(cu_rows_ptr, row)
    pending = row_pending(pending_ptr, row, RECORDS)
    held = pending + KEEP
    begin = tl.where(tl.load(start_ptr + row) > 0, 0, held)
    inputs, tokens = inputs_ptr + slot * (KEEP + RECORDS) * C, x_ptr + first * x_stride
    if (not known) | (count <= tl.program_id(2) * BLOCK_T):
        return
    if OUTPUTS:
        t = tl.program_id(2) * BLOCK_T + tl.arange(0, BLOCK_T).to(tl.int64)
        total = tl.zeros((BLOCK_T, BLOCK_C), tl.float32)
        for tap in tl.static_range(TAPS):
            at = pending + t + tap
            line = _lines(inputs, tokens, x_stride, held, count, begin, at, columns, C)
            weight = tl.load(weight_ptr + tap * C + columns, mask=columns < C, other=0.0)
            total += line.to(tl.float32) * weight[None, :]
        to = out_ptr + (first + t)[:, None] * C + columns[None, :]
        tl.store(to, _silu(total, out_ptr.dtype.element_ty), mask=(t < count)[:, None] & inside)
    if ADVANCE:
        i = tl.arange(0, BLOCK_L).to(tl.int64)
        window = tl.load(window_ptr + row) != 0
        copy_at, line = row_snapshot(snapshot_after_ptr, snapshot_line_ptr, row, num_lines)
        committed = tl.where(window, pending, pending + count)
        copied = _lines(inputs, tokens, x_stride, held, count, begin, copy_at + i, columns, C)
        kept = _lines(inputs, tokens, x_stride, held, count, begin, committed + i, columns, C)
        tl.debug_barrier()  # a thread may overwrite what another reads
        copies = i < tl.where((copy_at > 0) & (copy_at <= committed), KEEP, 0)
        to = snapshots_ptr + (line * KEEP + i)[:, None] * C + columns[None, :]
        tl.store(to, copied, mask=copies[:, None] & inside)
        keeps = i < KEEP + tl.where(window, tl.minimum(count, RECORDS), 0)
        tl.store(inputs + i[:, None] * C + columns[None, :], kept, mask=keeps[:, None] & inside)


def causal_conv(x: Tensor, weight: Tensor, conv: ConvState, rows: RecurrentRows) -> Tensor:
    """Convolve x, which may be a slice of a projection."""
    taps, (num_slots, lines, channels) = len(weight), conv.inputs.shape
    *columns, _, _ = rows  # all but `chunked` and `max_tokens`
    assert x.shape[1] == channels
    assert x.stride(1) == 1
    assert x.dtype is conv.inputs.dtype is conv.snapshots.dtype
    assert weight.dtype is torch.float32
    assert all(tensor.is_contiguous() for tensor in (weight, *conv, *columns))
    out = x.new_empty(x.shape)
    pieces = triton.cdiv(rows.max_tokens, _BLOCK_T)

    def launch(pieces: int, *, outputs: bool, advance: bool) -> None:
        grid = len(rows.slots), triton.cdiv(channels, _BLOCK_C), pieces
        _causal_conv_kernel[grid](
            out,
            x,
            weight,
            *conv,
            *columns,
            x.stride(0),
            channels,
            num_slots,
            len(conv.snapshots),
            TAPS=taps,
            RECORDS=lines - (taps - 1),
            BLOCK_T=min(_BLOCK_T, triton.next_power_of_2(rows.max_tokens)),
            BLOCK_L=triton.next_power_of_2(lines),
            BLOCK_C=_BLOCK_C,
            OUTPUTS=outputs,
            ADVANCE=advance,
        )

    if len(x) == 0:
        return out
    launch(pieces, outputs=True, advance=pieces == 1)
    if pieces > 1:
        launch(1, outputs=False, advance=True)
    return out
