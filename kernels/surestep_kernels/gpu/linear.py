"""Matrix products in Triton, for CUDA devices: quantised weights; plain ones are passed on.

A program computes a tile of y. Group by group it multiplies x by the codes, then applies the scales
to the sums in fp32. The codes of both formats, zero points subtracted, fit bf16: with x in bf16
tensor cores multiply them exactly and sum in fp32. With x in fp32 nothing is rounded either.

The groups are cut into splits (splits.py), each of them the sum of its groups in order. What is
left to the hardware is the order within a group: hence one matrix instruction for any number of
rows, as in plain_linear.py, whose tiles these have. Nothing of this has been measured.

Codes are padded to a power of two per group. Two 4-bit codes share a byte: those half a padded
group apart, so that each nibble meets consecutive x. Scales and zero points lie group by group.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Protocol

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from surestep_kernels.linear import PackedLinear, WeightFormat, linear_reference
from surestep_kernels.quantized import QuantizedWeight, pack_quantized_reference

from .plain_linear import FEW_ROWS, plain_parts
from .splits import Parts, Tiles, add_up, multiply, steps_per_split, store_tile

_MIN_GROUP = 32  # two operands of tl.dot, which takes 16 elements at least
_COLUMNS = 128
_FEW = Tiles(64, _COLUMNS, num_warps=4, num_stages=3, apart=True)
_MANY = Tiles(128, _COLUMNS, num_warps=8, num_stages=3, apart=False)
_FP32 = Tiles(16, 64, num_warps=4, num_stages=2, apart=True)  # no matrix instruction to keep


@triton.jit
def _decode_fp8(codes, dtype: tl.constexpr, NATIVE: tl.constexpr):
    """E4M3 in u8 to dtype; without an instruction for it as in cpu/linear_quantized.c."""
    if NATIVE:
        values = codes.to(tl.float8e4nv, bitcast=True).to(dtype)
    else:
        moved = ((codes.to(tl.int32) << 24) >> 4) & -2014314496  # 0x87f00000
        values = (moved.to(tl.float32, bitcast=True) * 1.329227995784916e36).to(dtype)  # 2^120
    return values


@triton.jit
def _multiply(sums, x, x_mask, w):
    """sums [M, N] += x [M, K] times w [N, K]."""
    values = tl.load(x, mask=x_mask, other=0.0)
    return tl.dot(values, tl.trans(w), sums, input_precision="ieee")


@triton.jit
def _group_sums(
    x, x_mask, codes, zeros, left, GROUP: tl.constexpr, INT4: tl.constexpr, NATIVE: tl.constexpr
):  # fmt: skip
    """x times the codes [N, STEP] of one group, of which `left` inputs exist, before the scales."""
    STEP: tl.constexpr = codes.shape[1]
    dtype: tl.constexpr = x.dtype.element_ty
    k = tl.arange(0, STEP)
    sums = tl.zeros((x.shape[0], codes.shape[0]), tl.float32)
    mask = x_mask & ((k < GROUP) & (k < left))[None, :]
    if INT4:
        zero = zeros.to(tl.float32)[:, None]
        low, high = (codes & 0xF).to(tl.float32) - zero, (codes >> 4).to(tl.float32) - zero
        high_mask = x_mask & ((k + STEP < GROUP) & (k + STEP < left))[None, :]
        sums = _multiply(sums, x, mask, low.to(dtype))
        sums = _multiply(sums, x + STEP, high_mask, high.to(dtype))
    else:
        sums = _multiply(sums, x, mask, _decode_fp8(codes, dtype, NATIVE))
    return sums


@triton.jit
def split_sums(
    x_ptr, codes_ptr, scales_ptr, zeros_ptr, rows, columns, M, N, K, first, last, groups,
    GROUP: tl.constexpr, BLOCK_K: tl.constexpr, INT4: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """The part of tile `rows` x `columns` of y that groups first..last make up."""
    STEP: tl.constexpr = BLOCK_K // 2 if INT4 else BLOCK_K
    k = tl.arange(0, STEP)
    x_mask, mask = (rows < M)[:, None], columns < N
    acc = tl.zeros((rows.shape[0], columns.shape[0]), tl.float32)
    for group in range(first, last):
        at = codes_ptr + columns[:, None] * (groups * STEP) + group * STEP + k[None, :]
        codes = tl.load(at, mask=mask[:, None], other=0)
        zeros = codes  # of no use without INT4
        if INT4:
            zeros = tl.load(zeros_ptr + group * N + columns, mask=mask, other=0)
        x = x_ptr + rows[:, None] * K + group * GROUP + k[None, :]
        left = K - group * GROUP
        sums = _group_sums(x, x_mask, codes, zeros, left, GROUP, INT4, NATIVE)
        acc += sums * tl.load(scales_ptr + group * N + columns, mask=mask, other=0.0)[None, :]
    return acc


@triton.jit(do_not_specialize=["M"])
def _linear_kernel(
    out_ptr,  # [M, N], or sums f32[splits, M, N] if APART
    x_ptr,  # [M, K]
    codes_ptr,  # u8[N, groups * BLOCK_K], or half as many with two in a byte
    scales_ptr,  # f32[groups, N]
    zeros_ptr,  # u8[groups, N]; INT4 only
    bias_ptr,  # [N]; HAS_BIAS only
    M,
    N,
    K,
    groups,
    per_split,  # groups of a split; the last one may have fewer
    SPLITS: tl.constexpr,
    APART: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    INT4: tl.constexpr,
    NATIVE: tl.constexpr,  # the device converts FP8
    HAS_BIAS: tl.constexpr,
):
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.program_id(1).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    begin = tl.program_id(2) if APART else 0
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for split in range(begin, begin + 1 if APART else SPLITS):
        first = split * per_split
        last = tl.minimum(first + per_split, groups)
        total += split_sums(
            x_ptr, codes_ptr, scales_ptr, zeros_ptr, rows, columns, M, N, K, first, last, groups,
            GROUP, BLOCK_K, INT4, NATIVE,
        )  # fmt: skip
    store_tile(out_ptr, total, bias_ptr, rows, columns, M, N, APART, HAS_BIAS)


def pack_quantized(weight: QuantizedWeight, bias: Tensor | None = None) -> PackedLinear:
    """Codes to bytes [N, groups * padded group], or half of that; the rest to [groups, N]."""
    rows, columns = weight.codes.shape
    group, groups = weight.group_size, weight.scales.shape[1]
    codes = functional.pad(weight.codes.view(torch.uint8), (0, groups * group - columns))
    codes = codes.view(rows, groups, group)
    codes = functional.pad(codes, (0, padded_group(group) - group))
    if weight.format is WeightFormat.INT4:
        low, high = codes.chunk(2, dim=2)
        codes = low | high << 4
    return replace(
        pack_quantized_reference(weight, bias),
        data=codes.flatten(1).contiguous(),
        scales=weight.scales.T.contiguous(),
        zeros=None if weight.zeros is None else weight.zeros.T.contiguous(),
    )


def linear_parts(
    x: Tensor, packed: PackedLinear, out_dtype: torch.dtype | None = None
) -> Parts:  # fmt: skip
    """See linear_reference; splits have yet to be added up. Quantised weights have scales."""
    product = plain_parts if packed.scales is None else _quantized_parts
    return product(x, packed, out_dtype)


def linear_parts_with_cublas(
    x: Tensor, packed: PackedLinear, out_dtype: torch.dtype | None = None
) -> Parts:
    """`linear_parts`, but plain weights are torch's: a row's bits depend on the number of rows."""
    if packed.scales is None:
        return Parts.whole(linear_reference(x, packed, out_dtype))
    return _quantized_parts(x, packed, out_dtype)


def linear(x: Tensor, packed: PackedLinear, out_dtype: torch.dtype | None = None) -> Tensor:
    """See linear_reference."""
    return add_up(linear_parts(x, packed, out_dtype))


class LinearParts(Protocol):
    """See linear_parts."""

    def __call__(
        self, x: Tensor, packed: PackedLinear, out_dtype: torch.dtype | None = None
    ) -> Parts: ...


def _quantized_parts(
    x: Tensor, packed: PackedLinear, out_dtype: torch.dtype | None = None
) -> Parts:
    assert packed.scales is not None
    assert x.is_contiguous()
    assert x.shape[1] == packed.in_features
    per_split = groups_per_split(packed)
    splits = triton.cdiv(len(packed.scales), per_split)
    launch = partial(_launch, x=x, packed=packed, per_split=per_split)
    return multiply(x, packed, out_dtype, _tiles(x), splits, launch)


def groups_per_split(packed: PackedLinear) -> int:
    """Groups whose sums are added up before they meet those of others: see splits.py."""
    groups = triton.cdiv(packed.in_features, packed.group_size)
    return steps_per_split(groups, packed.out_features, _COLUMNS)


def _launch(
    out: Tensor,
    bias: Tensor | None,
    tiles: Tiles,
    *,
    x: Tensor,
    packed: PackedLinear,
    per_split: int,
) -> None:
    assert packed.scales is not None
    rows, columns, groups = len(x), packed.out_features, len(packed.scales)
    splits = triton.cdiv(groups, per_split)
    tile_counts = triton.cdiv(rows, tiles.rows), triton.cdiv(columns, tiles.columns)
    _linear_kernel[*tile_counts, splits if tiles.apart else 1](
        *(out, x, packed.data, packed.scales, packed.zeros, bias),
        *(rows, columns, packed.in_features, groups, per_split),
        SPLITS=splits,
        APART=tiles.apart,
        GROUP=packed.group_size,
        BLOCK_M=tiles.rows,
        BLOCK_N=tiles.columns,
        BLOCK_K=padded_group(packed.group_size),
        INT4=packed.format is WeightFormat.INT4,
        NATIVE=converts_fp8(x.device),
        HAS_BIAS=bias is not None,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )


def _tiles(x: Tensor) -> Tiles:
    if x.dtype is torch.float32:
        return _FP32
    return _FEW if len(x) <= FEW_ROWS else _MANY


def converts_fp8(device: torch.device) -> bool:
    """Whether the device has an instruction that widens E4M3."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


def padded_group(group_size: int) -> int:
    """Codes of a group in the layout of pack_quantized."""
    return max(_MIN_GROUP, 1 << (group_size - 1).bit_length())
