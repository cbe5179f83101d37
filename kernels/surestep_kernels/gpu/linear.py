"""Matrix products with quantised weights in Triton, for CUDA devices.

It has only run in Triton's interpreter, on the CPU (tests/kernels). It compiles for sm_80 and sm_90
but has never run on a GPU, nor been measured.

A program computes a tile of BLOCK_M rows and BLOCK_N columns of y. Group by group it multiplies x
by the codes and applies the scales to the sums in fp32. Both factors are widened to fp32: bf16 and
the codes of both formats fit TF32, so that tensor cores multiply them exactly. All tiles have one
size, whatever the number of rows, so that on a GPU a row of y should not depend on its neighbours;
the interpreter, whose products are NumPy's, cannot show it.

Codes are padded to a power of two per group. Two 4-bit codes share a byte: those half a padded
group apart, so that each nibble meets consecutive x.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from surestep_kernels.linear import PackedLinear, WeightFormat, linear_reference
from surestep_kernels.quantized import QuantizedWeight, pack_quantized_reference

BLOCK_M, BLOCK_N = 16, 64
_MIN_GROUP = 32  # two operands of tl.dot, which takes 16 elements at least


@triton.jit
def _decode_fp8(codes):
    """E4M3 in u8 to fp32: see cpu/linear_quantized.c."""
    moved = ((codes.to(tl.int32) << 24) >> 4) & -2014314496  # 0x87f00000
    return moved.to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2^120


@triton.jit
def _multiply(acc, x, x_mask, w, PRECISION: tl.constexpr):
    """acc [M, N] += x [M, K] times w [N, K]."""
    values = tl.load(x, mask=x_mask, other=0.0).to(tl.float32)
    return tl.dot(values, tl.trans(w), acc, input_precision=PRECISION)


@triton.jit
def _linear_kernel(
    y_ptr,  # [M, N]
    x_ptr,  # [M, K]
    codes_ptr,  # u8[N, groups * BLOCK_K], or half as many with two in a byte
    scales_ptr,  # f32[N, groups]
    zeros_ptr,  # u8[N, groups]; INT4 only
    bias_ptr,  # [N]; HAS_BIAS only
    M,
    N,
    K,
    groups,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    INT4: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PRECISION: tl.constexpr,  # of products
):
    STEP: tl.constexpr = BLOCK_K // 2 if INT4 else BLOCK_K
    rows = (tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    columns = (tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    k = tl.arange(0, STEP)
    row_mask, column_mask = (rows < M)[:, None], columns < N
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for group in range(groups):
        at = codes_ptr + columns[:, None] * (groups * STEP) + group * STEP + k[None, :]
        codes = tl.load(at, mask=column_mask[:, None], other=0)
        scales = tl.load(scales_ptr + columns * groups + group, mask=column_mask, other=0.0)
        first = group * GROUP + k
        x = x_ptr + rows[:, None] * K + first[None, :]
        x_mask = row_mask & ((k < GROUP) & (first < K))[None, :]
        sums = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        if INT4:
            zeros = tl.load(zeros_ptr + columns * groups + group, mask=column_mask, other=0)
            zero = zeros.to(tl.float32)[:, None]
            x_mask_high = row_mask & ((k + STEP < GROUP) & (first + STEP < K))[None, :]
            low, high = (codes & 0xF).to(tl.float32) - zero, (codes >> 4).to(tl.float32) - zero
            sums = _multiply(sums, x, x_mask, low, PRECISION)
            sums = _multiply(sums, x + STEP, x_mask_high, high, PRECISION)
        else:
            sums = _multiply(sums, x, x_mask, _decode_fp8(codes), PRECISION)
        acc += sums * scales[None, :]
    if HAS_BIAS:
        acc += tl.load(bias_ptr + columns, mask=column_mask, other=0.0).to(tl.float32)[None, :]
    out = y_ptr + rows[:, None] * N + columns[None, :]
    tl.store(out, acc.to(y_ptr.dtype.element_ty), mask=row_mask & column_mask[None, :])


def pack_quantized(weight: QuantizedWeight, bias: Tensor | None = None) -> PackedLinear:
    """Codes to bytes [N, groups * padded group], or half of that for 4-bit weights."""
    rows, columns = weight.codes.shape
    group, groups = weight.group_size, weight.scales.shape[1]
    codes = functional.pad(weight.codes.view(torch.uint8), (0, groups * group - columns))
    codes = codes.view(rows, groups, group)
    codes = functional.pad(codes, (0, _padded(group) - group))
    if weight.format is WeightFormat.INT4:
        low, high = codes.chunk(2, dim=2)
        codes = low | high << 4
    return replace(pack_quantized_reference(weight, bias), data=codes.flatten(1).contiguous())


def linear(x: Tensor, packed: PackedLinear, out_dtype: torch.dtype | None = None) -> Tensor:
    """See linear_reference. Quantised weights have scales beside the data."""
    if packed.scales is None:
        return linear_reference(x, packed, out_dtype)
    assert x.is_contiguous()
    assert x.shape[1] == packed.in_features
    rows, columns = len(x), packed.out_features
    y = x.new_empty(rows, columns, dtype=out_dtype or x.dtype)
    grid = triton.cdiv(rows, BLOCK_M), triton.cdiv(columns, BLOCK_N)
    if rows == 0:
        return y
    _linear_kernel[grid](
        y,
        x,
        packed.data,
        packed.scales,
        packed.zeros,
        packed.bias,
        rows,
        columns,
        packed.in_features,
        packed.scales.shape[1],
        GROUP=packed.group_size,
        BLOCK_M=BLOCK_M,
        BLOCK_N=BLOCK_N,
        BLOCK_K=_padded(packed.group_size),
        INT4=packed.format is WeightFormat.INT4,
        HAS_BIAS=packed.bias is not None,
        PRECISION="ieee" if x.dtype is torch.float32 else "tf32",
    )
    return y


def _padded(group_size: int) -> int:
    return max(_MIN_GROUP, 1 << (group_size - 1).bit_length())
