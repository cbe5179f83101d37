"""Split-K, which all products of x [M, K] share: the weight's shape alone decides the splits of K.

With few rows every split is a program of its own, since otherwise too few programs would read the
weight, and a second kernel adds their sums; with many rows one program computes all splits, one
after the other. Either way y is the sum of the splits in order, so that a row does not depend on
the number of rows.

The second kernel also computes what follows the product in a layer, since one more launch would
cost more than its work: it takes the product as PartialSums (rms_norm.py, silu_and_mul.py,
project_heads/triton.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from surestep_kernels.columns.gpu.dependent_launch import DependentKernel, wait_for_earlier_kernels

from .reference import PackedLinear

_TARGET_PROGRAMS = 256  # splits add programs where there are few columns
_MIN_SPLIT = 2  # steps
_SUM_BLOCK = 128  # columns of a warp: 16 bytes of each split per thread


class Tiles(NamedTuple):
    """Division of a product into programs."""

    rows: int
    columns: int
    num_warps: int
    num_stages: int
    apart: bool  # whether each split is a program of its own


class PartialSums(NamedTuple):
    """A product y [M, N] before its last steps: add the sums of its splits in order, then the bias,
    and round to y's dtype."""

    sums: Tensor  # f32[splits, M, N]; or y [1, M, N] itself, bias and all
    bias: Tensor | None  # [N]
    dtype: torch.dtype  # of y

    @classmethod
    def whole(cls, y: Tensor) -> PartialSums:
        """Wrap a y for which nothing is left to do."""
        return cls(y.unsqueeze(0), None, y.dtype)

    @property
    def is_final(self) -> bool:
        """Return whether the first sum is y."""
        return len(self.sums) == 1 and self.bias is None and self.sums.dtype is self.dtype


# Fills y [M, N], bias and all, or f32[splits, M, N] if the tiles say "apart".
Launch = Callable[[Tensor, Tensor | None, Tiles], None]


def steps_per_split(steps: int, out_features: int, columns: int) -> int:
    """Return the steps along K that are summed before they are added to those of other splits.

    `columns` is not that of the tiles, which may change with the rows, but a constant of the
    kernel.
    """
    wanted = triton.cdiv(_TARGET_PROGRAMS, triton.cdiv(out_features, columns))
    per_split: int = triton.cdiv(steps, min(wanted, max(1, steps // _MIN_SPLIT)))
    return per_split


def multiply(
    x: Tensor,
    packed: PackedLinear,
    out_dtype: torch.dtype | None,
    tiles: Tiles,
    splits: int,
    launch: Launch,
) -> PartialSums:
    """Multiply x by the weight with `launch`; sum_partials() turns the result into a tensor."""
    dtype, shape = out_dtype or x.dtype, (len(x), packed.out_features)
    if tiles.apart and splits > 1:
        sums = x.new_empty(splits, *shape, dtype=torch.float32)
        if len(x):
            launch(sums, None, tiles)
        return PartialSums(sums, packed.bias, dtype)
    y = x.new_empty(shape, dtype=dtype)
    if len(x):
        launch(y, packed.bias, tiles._replace(apart=False))
    return PartialSums.whole(y)


def sum_partials(partials: PartialSums) -> Tensor:
    """Return y [M, N]."""
    if partials.is_final:
        return partials.sums[0]
    splits, rows, columns = partials.sums.shape
    y = partials.sums.new_empty(rows, columns, dtype=partials.dtype)
    if rows:
        grid = rows, triton.cdiv(columns, _SUM_BLOCK)
        options = {"SPLITS": splits, "HAS_BIAS": partials.bias is not None, "BLOCK": _SUM_BLOCK}
        _sum_splits_kernel[grid](y, *partials[:2], rows, columns, num_warps=1, **options)
    return y


@triton.jit
def store_tile(
    out_ptr, total, bias_ptr, rows, columns, M, N, APART: tl.constexpr, HAS_BIAS: tl.constexpr
):
    """Write a tile f32[rows, columns] to y [M, N], or to this program's split of several."""
    if HAS_BIAS:
        bias = tl.load(bias_ptr + columns, mask=columns < N, other=0.0)
        total += bias.to(tl.float32)[None, :]
    if APART:
        out_ptr += tl.program_id(2).to(tl.int64) * M * N
    mask = (rows < M)[:, None] & (columns < N)[None, :]
    at = out_ptr + rows[:, None] * N + columns[None, :]
    tl.store(at, total.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def load_total(
    sums_ptr, bias_ptr, at, column, mask, M, N, SPLITS: tl.constexpr, HAS_BIAS: tl.constexpr
):
    """Load elements of a product [M, N] in f32, not yet rounded.

    `at` (i64, offset within a split) and `mask` have the shape of the result, `column` the same or
    one that is broadcast to it. No load waits for a sum: the loop is unrolled in the compiled
    kernel.
    """
    total = tl.load(sums_ptr + at, mask=mask, other=0.0).to(tl.float32)
    for split in tl.static_range(1, SPLITS):
        part = tl.load(sums_ptr + split * M.to(tl.int64) * N + at, mask=mask, other=0.0)
        total += part.to(tl.float32)
    if HAS_BIAS:
        total += tl.load(bias_ptr + column, mask=column < N, other=0.0).to(tl.float32)
    return total


@DependentKernel
@triton.jit(do_not_specialize=["M"])  # M has to stay a tensor if it is 1
def _sum_splits_kernel(
    out_ptr,  # [M, N]
    sums_ptr,  # f32[SPLITS, M, N]
    bias_ptr,  # [N]; HAS_BIAS only
    M,
    N,
    SPLITS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    wait_for_earlier_kernels()
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at, mask = tl.program_id(0).to(tl.int64) * N + column, column < N
    total = load_total(sums_ptr, bias_ptr, at, column, mask, M, N, SPLITS, HAS_BIAS)
    tl.store(out_ptr + at, total.to(out_ptr.dtype.element_ty), mask=mask)
