"""Activations to FP8 codes in Triton, for products with FP8 weights (W8A8)."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from surestep_kernels.columns.gpu.dependent_launch import DependentKernel, wait_for_earlier_kernels

from .fp8_rows import CARRY, FP8_MAX, INFINITY
from .weight_tile import padded_group

_GROUPS = 8  # per program
_FP8_MAX, _CARRY = tl.constexpr(FP8_MAX), tl.constexpr(CARRY)
_INFINITY = tl.constexpr(INFINITY)


class Factor(NamedTuple):
    """x unchanged, or as FP8 codes and scales (ops.fp8_rows), laid out for products."""

    codes: Tensor  # [M, K], or float8_e4m3fn[M, groups * padded group], in FP8_ORDER
    scales: Tensor | None  # f32[groups, M]; of FP8 only


@DependentKernel
@triton.jit
def _quantize_rows_kernel(
    codes_ptr,  # [M, groups * BLOCK_K]
    scales_ptr,  # f32[groups, M]
    x_ptr,  # [M, K]
    M,
    K,
    groups,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    wait_for_earlier_kernels()
    row = tl.program_id(0).to(tl.int64)
    group, at = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS), tl.arange(0, BLOCK_K)
    k = at // 16 * 16 + at % 16 // 4 * 2 + at % 2 * 8 + at // 2 % 2  # FP8_ORDER
    column = group[:, None] * GROUP + k[None, :]
    mask = (k < GROUP)[None, :] & (column < K)
    x = tl.load(x_ptr + row * K + column, mask=mask, other=0.0).to(tl.float32)
    bits = tl.minimum(tl.max(tl.abs(x), axis=1).to(tl.int32, bitcast=True), _INFINITY)
    exponent = tl.maximum((bits + _CARRY >> 23) - 8, 1)
    x *= ((254 - exponent) << 23).to(tl.float32, bitcast=True)[:, None]
    codes = tl.where(tl.abs(x) <= _FP8_MAX, x, float("nan")).to(tl.float8e4nv)
    some = group < groups
    to = codes_ptr + row * (groups * BLOCK_K) + group[:, None] * BLOCK_K + at[None, :]
    tl.store(to, codes, mask=some[:, None])
    scales = (exponent << 23).to(tl.float32, bitcast=True)
    tl.store(scales_ptr + group.to(tl.int64) * M + row, scales, mask=some)


def quantize_rows(x: Tensor, group_size: int) -> Factor:
    """Quantise x [M, K] to FP8."""
    assert x.is_contiguous()
    (rows, columns), padded = x.shape, padded_group(group_size)
    groups = triton.cdiv(columns, group_size)
    codes = x.new_empty(rows, groups * padded, dtype=torch.float8_e4m3fn)
    scales = x.new_empty(groups, rows, dtype=torch.float32)
    if rows:
        _quantize_rows_kernel[rows, triton.cdiv(groups, _GROUPS)](
            codes,
            scales,
            x,
            rows,
            columns,
            groups,
            GROUP=group_size,
            GROUPS=_GROUPS,
            BLOCK_K=padded,
        )
    return Factor(codes, scales)
