"""Root-mean-square normalisation in Triton.

A program processes as many whole rows as fill a block. The block follows from the width alone, so
that the sum of a row has the same order whatever the number of rows.

The kernel that adds to the residual takes x as the partial sums of a product (splits.py). Their
number decides which thread holds which elements, so the kernel reads back what it has written
before it sums the squares.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from surestep_kernels.columns.gpu.dependent_launch import DependentKernel, wait_for_earlier_kernels
from surestep_kernels.linear.splits import PartialSums, load_total

_ELEMENTS = 2048  # of a block of narrow rows
_PER_WARP = 512  # elements
PER_WARP_OF_PARTIALS = 128  # 16 bytes of each split for a thread


@triton.jit
def _normalise(wide, weight, eps, width, dtype: tl.constexpr):
    """Normalise rows [R, H] in fp32, H masked with zeros; the result is rounded once to dtype."""
    mean = tl.sum(wide * wide, axis=1) / width
    normed = wide * (1.0 / tl.sqrt_rn(mean + eps))[:, None]
    return normed.to(dtype).to(tl.float32) * weight[None, :]


@DependentKernel
@triton.jit(do_not_specialize=["rows"])
def _rms_norm_kernel(
    out_ptr,  # [T, heads, H]
    x_ptr,  # [T, heads, H], strides x_token, x_head, 1
    weight_ptr,  # f32[H]
    eps,
    rows,  # T * heads
    heads,
    width,  # H
    x_token,
    x_head,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    wait_for_earlier_kernels()
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    mask = (row < rows)[:, None] & (column < width)[None, :]
    start = (row // heads) * x_token + (row % heads) * x_head
    x = tl.load(x_ptr + start[:, None] + column[None, :], mask=mask, other=0.0)
    weight = tl.load(weight_ptr + column, mask=column < width, other=0.0)
    out = _normalise(x.to(tl.float32), weight, eps, width, x_ptr.dtype.element_ty)
    at = out_ptr + row[:, None] * width + column[None, :]
    tl.store(at, out.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def add_and_normalise(out_ptr, residual_ptr, weight_ptr, x, at, column, mask, eps, width):
    """Add whole rows x [R, H], rounded, to the residual's elements `at`, and normalise them."""
    dtype: tl.constexpr = residual_ptr.dtype.element_ty
    residual = tl.load(residual_ptr + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(residual_ptr + at, (residual + x.to(tl.float32)).to(dtype), mask=mask)
    tl.debug_barrier()  # a thread reads what others wrote
    total = tl.load(residual_ptr + at, mask=mask, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + column, mask=column < width, other=0.0)
    tl.store(out_ptr + at, _normalise(total, weight, eps, width, dtype).to(dtype), mask=mask)


@DependentKernel
@triton.jit(do_not_specialize=["rows"])
def _add_rms_norm_kernel(
    out_ptr,  # [T, H]
    sums_ptr,  # f32[SPLITS, T, H], or x [1, T, H]
    bias_ptr,  # [H]; HAS_BIAS only
    residual_ptr,  # [T, H]; x is added to it
    weight_ptr,  # f32[H]
    eps,
    rows,  # T
    width,  # H
    SPLITS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    wait_for_earlier_kernels()
    dtype: tl.constexpr = residual_ptr.dtype.element_ty
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    mask = (row < rows)[:, None] & (column < width)[None, :]
    at = row[:, None] * width + column[None, :]
    x = load_total(sums_ptr, bias_ptr, at, column[None, :], mask, rows, width, SPLITS, HAS_BIAS)
    add_and_normalise(out_ptr, residual_ptr, weight_ptr, x.to(dtype), at, column, mask, eps, width)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalise x, which may be a slice: only its last dimension must be contiguous."""
    assert x.dim() in (2, 3)
    _check_weight(weight, x.shape[-1])
    by_head = x if x.dim() == 3 else x.unsqueeze(1)
    tokens, heads, width = by_head.shape
    x_token, x_head, element = by_head.stride()
    assert element == 1 or width == 1
    out = x.new_empty(x.shape)
    rows, (grid, tiles) = tokens * heads, tiles_of_rows(tokens * heads, width, _PER_WARP)
    if rows:
        _rms_norm_kernel[grid](
            out, by_head, weight, eps, rows, heads, width, x_token, x_head, **tiles
        )
    return out


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    assert x.is_contiguous()
    assert x.dtype is residual.dtype
    return add_rms_norm_of_partials(PartialSums.whole(x), residual, weight, eps)


def add_rms_norm_of_partials(
    x: PartialSums, residual: Tensor, weight: Tensor, eps: float
) -> Tensor:
    """Fuse add_rms_norm_reference with adding up the splits of the product x."""
    splits, rows, width = x.sums.shape
    assert residual.is_contiguous()
    assert residual.dtype is x.dtype
    assert residual.shape == (rows, width)
    _check_weight(weight, width)
    out = torch.empty_like(residual)
    grid, tiles = tiles_of_rows(rows, width, PER_WARP_OF_PARTIALS)
    options = {"SPLITS": splits, "HAS_BIAS": x.bias is not None, "enable_fp_fusion": False}
    if rows:
        arguments = out, *x[:2], residual, weight, eps, rows, width
        _add_rms_norm_kernel[grid](*arguments, **options, **tiles)
    return out


def _check_weight(weight: Tensor, width: int) -> None:
    assert weight.dtype is torch.float32
    assert weight.is_contiguous()
    assert weight.numel() == width


def tiles_of_rows(rows: int, width: int, per_warp: int) -> tuple[tuple[int], dict[str, int]]:
    """Return grid and block of a launch; only the grid depends on the number of rows."""
    block = triton.next_power_of_2(width)
    per_program = max(1, _ELEMENTS // block)
    warps = min(16, max(4, block * per_program // per_warp))
    return (triton.cdiv(rows, per_program),), {
        "ROWS": per_program,
        "BLOCK": block,
        "num_warps": warps,
    }
