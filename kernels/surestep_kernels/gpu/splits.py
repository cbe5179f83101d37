"""What products of x [M, K] have in common: K is cut into splits by the weight's shape alone.

With few rows every split is a program of its own, or too few programs would read the weight, and a
second kernel adds their sums; with many rows one program takes all splits, one after the other.
Either way y is the sum of the splits in order, so that a row does not depend on how many there are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from surestep_kernels.linear import PackedLinear

_WANTED_PROGRAMS = 256  # splits make up for those that columns lack
_MIN_SPLIT = 2  # steps
_SUM_BLOCK = 512


class Tiles(NamedTuple):
    """How a product is cut into programs."""

    rows: int
    columns: int
    num_warps: int
    num_stages: int
    apart: bool  # whether each split is a program of its own


# Fills y [M, N], bias and all, or f32[splits, M, N] if the tiles say "apart".
Launch = Callable[[Tensor, Tensor | None, Tiles], None]


def steps_per_split(steps: int, out_features: int, columns: int) -> int:
    """Steps along K that are added up before they meet those of other splits.

    `columns` is not that of the tiles, which may change with the rows, but a number of the kernel.
    """
    wanted = triton.cdiv(_WANTED_PROGRAMS, triton.cdiv(out_features, columns))
    per_split: int = triton.cdiv(steps, min(wanted, max(1, steps // _MIN_SPLIT)))
    return per_split


def multiply(
    x: Tensor,
    packed: PackedLinear,
    out_dtype: torch.dtype | None,
    tiles: Tiles,
    splits: int,
    launch: Launch,
) -> Tensor:
    """x times the weight, by `launch` and where it is needed the sum of what that made."""
    y = x.new_empty(len(x), packed.out_features, dtype=out_dtype or x.dtype)
    if len(x) == 0:
        return y
    if not tiles.apart or splits == 1:
        launch(y, packed.bias, tiles._replace(apart=False))
        return y
    sums = x.new_empty(splits, *y.shape, dtype=torch.float32)
    launch(sums, None, tiles)
    grid = len(x), triton.cdiv(packed.out_features, _SUM_BLOCK)
    options = {"BLOCK": _SUM_BLOCK, "HAS_BIAS": packed.bias is not None}
    _sum_splits_kernel[grid](y, sums, packed.bias, *y.shape, splits, **options)
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


@triton.jit(do_not_specialize=["M", "splits"])
def _sum_splits_kernel(
    out_ptr,  # [M, N]
    sums_ptr,  # f32[splits, M, N]
    bias_ptr,  # [N]; HAS_BIAS only
    M,
    N,
    splits,
    BLOCK: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < N
    total = tl.zeros((BLOCK,), tl.float32)
    for split in range(splits):
        at = sums_ptr + (split * M.to(tl.int64) + row) * N + column
        total += tl.load(at, mask=mask, other=0.0)
    if HAS_BIAS:
        total += tl.load(bias_ptr + column, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * N + column, total.to(out_ptr.dtype.element_ty), mask=mask)
