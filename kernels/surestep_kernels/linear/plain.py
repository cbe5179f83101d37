"""Matrix products with unquantised weights in Triton, for CUDA devices.

cuBLAS picks its kernel by the number of rows, and with it the order in which products are added:
the last bits of a row would depend on its neighbours, and a window of drafts might choose another
token than the same tokens one by one. Here the order along K follows from the weight alone
(splits.py), and the tiles for few rows and for many differ in what they hold, not in how they add.

That includes the matrix instruction. On sm_90 tiles of fewer than 64 rows compile to mma, others to
wgmma, and whether these two round alike is not documented. So tiles have at least 64 rows, and the
same number of columns whatever their rows: all compile to wgmma m64n128k16. A step that decodes one
row multiplies 63 rows of padding, which are not read; it should still be bound by reading the
weight. An H200 reads it at 40 to 80 % of a copy's rate. If a GPU is found to round alike in all of
its instructions, sequential.py is used instead (families.py).
"""

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from surestep_kernels.columns.gpu.dependent_launch import DependentKernel, wait_for_earlier_kernels

from .reference import PackedLinear
from .splits import PartialSums, Tiles, multiply, steps_per_split, store_tile, sum_partials

_BLOCK_K, _COLUMNS = 64, 128
FEW_ROWS = 256  # at most
_PROGRAMS = 132  # one per multiprocessor: if there are more, splits need not be apart
_FEW = Tiles(64, _COLUMNS, num_warps=4, num_stages=4, apart=True)
_MANY = Tiles(128, _COLUMNS, num_warps=8, num_stages=3, apart=False)
_FP32 = Tiles(16, 64, num_warps=4, num_stages=2, apart=True)  # no matrix instruction to keep


@triton.jit
def plain_sums(
    x_ptr,
    w_ptr,
    rows,
    columns,
    M,
    N,
    K,
    first,
    last,
    BLOCK_K: tl.constexpr,
    WEIGHT_FIRST: tl.constexpr = False,
):
    """Return the part of x [M, K] times w [N, K] from steps first..last of BLOCK_K.

    f32[rows, columns]; with WEIGHT_FIRST f32[columns, rows], from instructions whose first operand
    is the weight.
    """
    x_at, w_at = x_ptr + rows[:, None] * K, w_ptr + columns[:, None] * K
    x_mask, w_mask = (rows < M)[:, None], (columns < N)[:, None]
    if WEIGHT_FIRST:
        acc = tl.zeros((columns.shape[0], rows.shape[0]), tl.float32)
    else:
        acc = tl.zeros((rows.shape[0], columns.shape[0]), tl.float32)
    for step in range(first, last):
        k = (step * BLOCK_K + tl.arange(0, BLOCK_K))[None, :]
        x = tl.load(x_at + k, mask=x_mask & (k < K), other=0.0)
        w = tl.load(w_at + k, mask=w_mask & (k < K), other=0.0)
        if WEIGHT_FIRST:
            acc = tl.dot(w, tl.trans(x), acc, input_precision="ieee")
        else:
            acc = tl.dot(x, tl.trans(w), acc, input_precision="ieee")
    return acc


@triton.jit
def _all_splits(x_ptr, w_ptr, rows, columns, M, N, K, per_split, BLOCK_K: tl.constexpr):
    """Return the total of all splits' sums in one loop, which loads a split while adding another.

    It ends with a partial split, or with zero, which changes no bit.
    """
    x_at, w_at = x_ptr + rows[:, None] * K, w_ptr + columns[:, None] * K
    x_mask, w_mask = (rows < M)[:, None], (columns < N)[:, None]
    total = tl.zeros((rows.shape[0], columns.shape[0]), tl.float32)
    acc = tl.zeros((rows.shape[0], columns.shape[0]), tl.float32)
    for step in range(tl.cdiv(K, BLOCK_K)):
        k = (step * BLOCK_K + tl.arange(0, BLOCK_K))[None, :]
        x = tl.load(x_at + k, mask=x_mask & (k < K), other=0.0)
        w = tl.load(w_at + k, mask=w_mask & (k < K), other=0.0)
        acc = tl.dot(x, tl.trans(w), acc, input_precision="ieee")
        if (step + 1) % per_split == 0:
            total += acc
            acc = tl.zeros((rows.shape[0], columns.shape[0]), tl.float32)
    return total + acc


# The steps of a split are not a constant: if the compiler knew the border, it could start a sum
# from the total where it has to start from zero.
@DependentKernel
@triton.jit(do_not_specialize=["M", "per_split"])
def _plain_linear_kernel(
    out_ptr,  # [M, N], or sums f32[splits, M, N] if APART
    x_ptr,  # [M, K]
    w_ptr,  # [N, K]
    bias_ptr,  # [N]; HAS_BIAS only
    M,
    N,
    K,
    per_split,  # steps of a split; the last one may have fewer
    APART: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    wait_for_earlier_kernels()
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.program_id(1).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    if APART:
        first = tl.program_id(2) * per_split
        last = tl.minimum(first + per_split, tl.cdiv(K, BLOCK_K))
        total = plain_sums(x_ptr, w_ptr, rows, columns, M, N, K, first, last, BLOCK_K)
    else:
        total = _all_splits(x_ptr, w_ptr, rows, columns, M, N, K, per_split, BLOCK_K)
    store_tile(out_ptr, total, bias_ptr, rows, columns, M, N, APART, HAS_BIAS)


def plain_linear(x: Tensor, packed: PackedLinear, out_dtype: torch.dtype | None = None) -> Tensor:
    """Multiply as linear_reference, but a wider out_dtype takes the product unrounded."""
    return sum_partials(plain_partials(x, packed, out_dtype))


def plain_partials(
    x: Tensor, packed: PackedLinear, out_dtype: torch.dtype | None = None
) -> PartialSums:
    """Return plain_linear before its splits are added up."""
    assert packed.scales is None
    assert x.dtype is packed.data.dtype
    assert x.is_contiguous()
    assert packed.data.is_contiguous()
    steps = triton.cdiv(packed.in_features, _BLOCK_K)
    splits = triton.cdiv(steps, _per_split(packed))
    launch = partial(_launch, x=x, packed=packed, splits=splits)
    return multiply(x, packed, out_dtype, _tiles(x, packed, out_dtype), splits, launch)


def _per_split(packed: PackedLinear) -> int:
    """Return the number of steps in a split."""
    steps = triton.cdiv(packed.in_features, _BLOCK_K)
    return steps_per_split(steps, packed.out_features, _COLUMNS)


def _launch(
    out: Tensor, bias: Tensor | None, tiles: Tiles, *, x: Tensor, packed: PackedLinear, splits: int
) -> None:
    rows, columns = len(x), packed.out_features
    tile_counts = triton.cdiv(rows, tiles.rows), triton.cdiv(columns, tiles.columns)
    _plain_linear_kernel[*tile_counts, splits if tiles.apart else 1](
        out,
        x,
        packed.data,
        bias,
        rows,
        columns,
        packed.in_features,
        _per_split(packed),
        APART=tiles.apart,
        BLOCK_M=tiles.rows,
        BLOCK_N=tiles.columns,
        BLOCK_K=_BLOCK_K,
        HAS_BIAS=bias is not None,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )


def _tiles(x: Tensor, packed: PackedLinear, out_dtype: torch.dtype | None) -> Tiles:
    """Choose tiles. Wide results are logits, of more rows than any step that is run to compile
    kernels.

    So they have one kind of tiles. Splits are apart where the tiles alone are too few programs:
    sums that are stored apart are written and read again, 4 bytes of each split for each element of
    y.
    """
    few = len(x) <= FEW_ROWS
    if x.dtype is torch.float32:
        tiles = _FP32
    else:
        tiles = _FEW if few or out_dtype is torch.float32 else _MANY
    programs = triton.cdiv(len(x), tiles.rows) * triton.cdiv(packed.out_features, tiles.columns)
    return tiles._replace(apart=few and programs < _PROGRAMS)
