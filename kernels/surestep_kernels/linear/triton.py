"""Matrix products with quantised weights in Triton, for CUDA devices; others go to plain.py.

A program computes a tile of y, as W x^T (weight_tile.py). Group by group it multiplies the codes by
x, then applies the scales to the sums in fp32, in registers. The codes of all formats, zero points
subtracted, fit bf16: with x in bf16, tensor cores multiply them exactly and sum in fp32. With x in
fp32 nothing is rounded either. x may be FP8 codes itself (fp8_rows.py) if the weight is. MXFP4 has
powers of two as scales, which its numbers absorb in bf16: they are multiplied as unquantised
weights are, two groups at a time.

The groups are cut into splits (splits.py), each of them the sum of its groups in order. Only the
order within a group is left to the hardware. So one instruction serves any number of rows,
m64n64k16 on sm_90: whether an instruction of another width adds alike is not documented. Several
`widths` are for devices on which they were found to add alike (probe.py): an H200 is one, and
multiplies few rows by experts in MXFP4 in 0.7 of the time.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Protocol

import torch
import triton
import triton.language as tl
from surestep_common.errors import InvalidRequest
from torch import Tensor
from torch.nn import functional

from surestep_kernels.columns.gpu.dependent_launch import DependentKernel, wait_for_earlier_kernels

from .plain import plain_partials
from .quantized import QuantizedWeight, pack_quantized_reference
from .reference import PackedLinear, WeightFormat
from .splits import PartialSums, Tiles, multiply, steps_per_split, store_tile, sum_partials
from .triton_fp8_rows import Factor, quantize_rows
from .weight_tile import (
    FP8,
    INT4,
    MXFP4,
    MXFP4_STEP,
    NVFP4,
    TILE_ROWS,
    e2m1_tile,
    fp8_codes,
    fp8_tile,
    int4_tile,
    mxfp4_tile,
    pack_codes,
    padded_group,
    places,
)

ONE_WIDTH = (64,)  # rows of x that one instruction multiplies
ALL_WIDTHS = (16, 32, 64)  # wider ones spill: several sums are live at once
_PROGRAMS = 132  # multiprocessors: splits make up for missing tiles
_FP32 = Tiles(16, TILE_ROWS, num_warps=4, num_stages=2, apart=True)  # no matrix instruction


@triton.jit
def group_sums(
    x_ptr,
    rows,
    words,
    zeros,
    M,
    K,
    group,
    groups,
    GROUP: tl.constexpr,
    BLOCK_K: tl.constexpr,
    FORMAT: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Return the codes [ROWS, BLOCK_K] of a group times x^T, before the scales: f32[ROWS, rows]."""
    k, here = tl.arange(0, BLOCK_K), (rows < M)[:, None]
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    if dtype.primitive_bitwidth == 8:
        at = x_ptr + rows[:, None] * (groups * BLOCK_K) + group * BLOCK_K + k[None, :]
        x = tl.load(at, mask=here, other=0.0)
        weight = fp8_codes(words, ROWS, BLOCK_K)
    else:
        at = x_ptr + rows[:, None] * K + group * GROUP + k[None, :]
        x = tl.load(at, mask=here & ((k < GROUP) & (k < K - group * GROUP))[None, :], other=0.0)
        if FORMAT == INT4:
            weight = int4_tile(words, zeros, dtype, ROWS, BLOCK_K)
        elif FORMAT == NVFP4:
            weight = e2m1_tile(words, ROWS, BLOCK_K).to(dtype)
        else:
            weight = fp8_tile(words, dtype, ROWS, BLOCK_K)
    return tl.dot(weight, tl.trans(x), input_precision="ieee")


@triton.jit
def _add_mxfp4(
    acc, x_ptr, rows, words, exponents, M, K, step, BLOCK_K: tl.constexpr, ROWS: tl.constexpr
):
    """Add to acc f32[ROWS, rows] the product of a step's two groups."""
    k, here = step * BLOCK_K + tl.arange(0, BLOCK_K), (rows < M)[:, None]
    x = tl.load(x_ptr + rows[:, None] * K + k[None, :], mask=here & (k < K)[None, :], other=0.0)
    weight = mxfp4_tile(words, exponents.to(tl.int32), x_ptr.dtype.element_ty, ROWS, BLOCK_K)
    return tl.dot(weight, tl.trans(x), acc, input_precision="ieee")


@triton.jit
def quantized_sums(
    x_ptr,
    x_scales_ptr,
    words_ptr,
    scales_ptr,
    rows,
    columns,
    row_blocks,
    M,
    N,
    K,
    first,
    last,
    groups,
    per_split,
    GROUP: tl.constexpr,
    BLOCK_K: tl.constexpr,
    FORMAT: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """Return groups first..last of W x^T: f32[columns, rows]; with SPLITS, split by split.

    `row_blocks` are the row blocks of the tile's words, whose rows are the weight's `columns`
    outputs.
    """
    ROWS: tl.constexpr = columns.shape[0]
    IN_BLOCK: tl.constexpr = BLOCK_K * (4 if FORMAT == FP8 else 2)  # words of a group
    _, place = places(ROWS, BLOCK_K, FORMAT)
    at = words_ptr + row_blocks.to(tl.int64) * groups * IN_BLOCK + place
    acc = tl.zeros((ROWS, rows.shape[0]), tl.float32)
    total = tl.zeros((ROWS, rows.shape[0]), tl.float32)
    for group in range(first, last):
        words = tl.load(at + group * IN_BLOCK)
        scales = tl.load(scales_ptr + group * N + columns, mask=columns < N, other=0)
        if FORMAT == MXFP4:
            acc = _add_mxfp4(acc, x_ptr, rows, words, scales, M, K, group, BLOCK_K, ROWS)
        else:
            zeros = scales & 0xF  # of INT4, whose scales leave these bits
            if FORMAT == INT4:
                scales = scales & -16
            sums = group_sums(
                x_ptr, rows, words, zeros, M, K, group, groups, GROUP, BLOCK_K, FORMAT, ROWS
            )
            if x_ptr.dtype.element_ty.primitive_bitwidth == 8:  # scales of x: powers of two, exact
                x_scales = tl.load(x_scales_ptr + group * M + rows, mask=rows < M, other=0.0)
                sums *= x_scales[None, :]
            # One explicit rounding: what a compiler fuses might differ between variants.
            acc = tl.fma(sums, scales.to(tl.float32, bitcast=True)[:, None], acc)
        if SPLITS:  # noqa: SIM102 the one is for the compiler
            if (group + 1) % per_split == 0:
                total += acc
                acc = tl.zeros_like(acc)
    return total + acc if SPLITS else acc


@DependentKernel
@triton.jit(do_not_specialize=["M", "per_split"])
def _linear_kernel(
    out_ptr,  # [M, N], or sums f32[splits, M, N] if APART
    x_ptr,  # [M, K], or codes [M, groups * BLOCK_K]
    x_scales_ptr,  # f32[groups, M]; of codes only
    words_ptr,  # i32: see weight_tile.py
    scales_ptr,  # [groups, N]: those of pack_quantized
    bias_ptr,  # [N]; HAS_BIAS only
    M,
    N,
    K,
    groups,
    per_split,  # groups of a split; the last one may have fewer
    SPLITS: tl.constexpr,  # there are more than one, and this program takes all
    APART: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    FORMAT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    wait_for_earlier_kernels()
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.program_id(1).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    block, _ = places(BLOCK_N, BLOCK_K, FORMAT)
    first, last = 0, groups
    if APART:
        first = tl.program_id(2) * per_split
        last = tl.minimum(first + per_split, groups)
    total = quantized_sums(
        x_ptr,
        x_scales_ptr,
        words_ptr,
        scales_ptr,
        rows,
        columns,
        tl.program_id(1) * (BLOCK_N // 16) + block,
        M,
        N,
        K,
        first,
        last,
        groups,
        per_split,
        GROUP,
        BLOCK_K,
        FORMAT,
        SPLITS,
    )
    store_tile(out_ptr, tl.trans(total), bias_ptr, rows, columns, M, N, APART, HAS_BIAS)


def pack_quantized(weight: QuantizedWeight, bias: Tensor | None = None) -> PackedLinear:
    """Pack codes as in weight_tile.py; scales are i32[groups, N], for INT4 with the zeros in 4
    bits. MXFP4 has i16[steps, N], the exponents of two groups, which count as one of 64 inputs.
    Raises InvalidRequest for affine weights: no kernel here multiplies them.
    """
    if weight.mins is not None:
        raise InvalidRequest("weights whose groups have minima have no GPU kernels", param="model")
    if weight.format is WeightFormat.MXFP4:
        return _pack_mxfp4(weight, bias)
    int4 = weight.format in (WeightFormat.INT4, WeightFormat.NVFP4)
    scales = weight.scales.view(torch.int32)
    if weight.zeros is not None:
        scales = scales | weight.zeros  # see QuantizedWeight
    return replace(
        pack_quantized_reference(weight, bias),
        data=pack_codes(weight.codes.view(torch.uint8), weight.group_size, int4=int4),
        scales=scales.T.contiguous(),
        zeros=None,
    )


def _pack_mxfp4(weight: QuantizedWeight, bias: Tensor | None) -> PackedLinear:
    exponents = functional.pad(weight.scales, (0, weight.scales.shape[1] % 2))
    return replace(
        pack_quantized_reference(weight, bias),
        data=pack_codes(weight.codes, MXFP4_STEP, int4=True),
        scales=exponents.view(torch.int16).T.contiguous(),
        group_size=MXFP4_STEP,
    )


def linear_partials(
    x: Tensor,
    packed: PackedLinear,
    out_dtype: torch.dtype | None = None,
    widths: tuple[int, ...] = ONE_WIDTH,
    *,
    fp8_rows: bool = False,
) -> PartialSums:
    """Multiply as linear_reference, but leave the splits to be added up.

    `widths` and `fp8_rows` are as in quantized_partials.
    """
    if packed.scales is None:
        return plain_partials(x, packed, out_dtype)
    return quantized_partials(x, packed, out_dtype, widths, fp8_rows=fp8_rows)


def linear(
    x: Tensor,
    packed: PackedLinear,
    out_dtype: torch.dtype | None = None,
    widths: tuple[int, ...] = ONE_WIDTH,
    *,
    fp8_rows: bool = False,
) -> Tensor:
    return sum_partials(linear_partials(x, packed, out_dtype, widths, fp8_rows=fp8_rows))


class LinearPartials(Protocol):
    def __call__(
        self, x: Tensor, packed: PackedLinear, out_dtype: torch.dtype | None = None
    ) -> PartialSums: ...


def quantized_partials(
    x: Tensor,
    packed: PackedLinear,
    out_dtype: torch.dtype | None = None,
    widths: tuple[int, ...] = ONE_WIDTH,
    *,
    fp8_rows: bool = False,
) -> PartialSums:
    """Return the product with a quantised weight by instructions of `widths` rows, ascending.

    With `fp8_rows`, FP8 weights are multiplied by activations in FP8 (W8A8).
    """
    assert packed.scales is not None
    fp8_rows = fp8_rows and packed.format is WeightFormat.FP8
    assert x.is_contiguous()
    assert x.shape[1] == packed.in_features
    per_split = groups_per_split(packed)
    splits = triton.cdiv(len(packed.scales), per_split)
    factor = quantize_rows(x, packed.group_size) if fp8_rows else Factor(x, None)
    tiles = choose_tiles(len(x), packed, factor.codes.dtype, widths)
    launch = partial(_launch, x=factor, packed=packed, per_split=per_split)
    return multiply(x, packed, out_dtype, tiles, splits, launch)


def groups_per_split(packed: PackedLinear) -> int:
    """Return the number of groups in a split (see splits.py)."""
    groups = triton.cdiv(packed.in_features, packed.group_size)
    return steps_per_split(groups, packed.out_features, TILE_ROWS)


def choose_tiles(
    rows: int, packed: PackedLinear, dtype: torch.dtype, widths: tuple[int, ...]
) -> Tiles:
    """Choose tiles for `rows` rows of x: more inputs per program, or more programs."""
    if dtype is torch.float32:
        return _FP32
    width = next((width for width in widths if width >= rows), widths[-1])
    tiles = triton.cdiv(rows, width) * triton.cdiv(packed.out_features, TILE_ROWS)
    if tiles < 2 * _PROGRAMS:
        return Tiles(width, TILE_ROWS, num_warps=4, num_stages=4, apart=tiles < _PROGRAMS)
    return Tiles(width, 2 * TILE_ROWS, num_warps=8, num_stages=3, apart=False)


def _launch(
    out: Tensor,
    bias: Tensor | None,
    tiles: Tiles,
    *,
    x: Factor,
    packed: PackedLinear,
    per_split: int,
) -> None:
    assert packed.scales is not None
    rows, columns, groups = len(x.codes), packed.out_features, len(packed.scales)
    splits = triton.cdiv(groups, per_split)
    tile_counts = triton.cdiv(rows, tiles.rows), triton.cdiv(columns, tiles.columns)
    _linear_kernel[*tile_counts, splits if tiles.apart else 1](
        out,
        x.codes,
        x.scales,
        packed.data,
        packed.scales,
        bias,
        rows,
        columns,
        packed.in_features,
        groups,
        per_split,
        SPLITS=splits > 1 and not tiles.apart,
        APART=tiles.apart,
        GROUP=packed.group_size,
        BLOCK_M=tiles.rows,
        BLOCK_N=tiles.columns,
        BLOCK_K=padded_group(packed.group_size),
        FORMAT=int(packed.format),
        HAS_BIAS=bias is not None,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )
