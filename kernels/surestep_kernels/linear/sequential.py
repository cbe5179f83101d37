"""Matrix products with unquantised weights whose tiles follow the number of rows, in Triton.

Every element of y is one fp32 sum over k = 0, 16, 32, .. in that order, as the matrix instructions
of one tile after the other add to it: K is never split. So the bits of a row can depend on its tile
in one way only: mma.sync and wgmma, or wgmma of different widths, may round differently. The
hardware's manual does not say; probe.py tests the GPU, and unless they agree plain.py is
used.

How fast it may be on an H200, by a model and not measured: few rows, N = 2048: 128 programs, one
for each multiprocessor but four, read 16 rows of the weight in steps of 256, which is 8 KB. Of 5
buffers 4 are in flight: 4 MB in all, where 4.8 TB/s for 0.7 us are 3.4 MB. But a sum is a chain of
K / 16 instructions that wait for each other, some 33 cycles at 1.75 GHz: 2.4 us for K = 2048, where
the bytes take 2.0; so 80 %. From N = 4096 on a multiprocessor has several chains, and the bytes
decide. A wide weight is the operand of which wgmma takes 64 rows: 16 KB a step, 4 of them in
flight, two programs on a multiprocessor. Many rows, N >= 8192: tiles of 128 x 256 do 85 FLOP for
each byte from L2, whose 6 TB/s or so then allow half of the GPU's arithmetic.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from surestep_kernels.columns.gpu.dependent_launch import DependentKernel, wait_for_earlier_kernels

from .plain import plain_sums
from .reference import PackedLinear
from .splits import store_tile

SERVED = torch.bfloat16
_WIDE = 8192  # columns from which 64 per program still give enough programs


class Tile(NamedTuple):
    """Work of a program."""

    rows: int
    columns: int
    depth: int  # of K, in a stage
    weight_first: bool  # the weight is the operand of which instructions take 16 or 64 rows
    num_warps: int
    num_stages: int


class _Bucket(NamedTuple):
    rows: int  # at most
    narrow: Tile
    wide: Tile


# The last one has any number of rows.
_BUCKETS = (
    _Bucket(8, Tile(8, 16, 256, True, 1, 6), Tile(16, 64, 128, True, 4, 5)),
    _Bucket(32, Tile(32, 16, 256, True, 2, 5), Tile(32, 64, 128, True, 4, 4)),
    _Bucket(64, Tile(64, 32, 128, False, 4, 4), Tile(64, 128, 64, False, 4, 4)),
    _Bucket(256, Tile(64, 64, 128, False, 4, 3), Tile(128, 128, 64, False, 8, 3)),
    _Bucket(0, Tile(128, 128, 64, False, 8, 3), Tile(128, 256, 64, False, 8, 3)),
)
BORDERS = tuple(bucket.rows for bucket in _BUCKETS[:-1])
_LOGITS = Tile(64, 128, 64, False, 4, 4)
TILES = tuple(dict.fromkeys(tile for _, *tiles in _BUCKETS for tile in tiles))


@DependentKernel
@triton.jit(do_not_specialize=["M"])
def _sequential_linear_kernel(
    out_ptr,  # [M, N]
    x_ptr,  # [M, K]
    w_ptr,  # [N, K]
    bias_ptr,  # [N]; HAS_BIAS only
    M,
    N,
    K,
    WEIGHT_FIRST: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    wait_for_earlier_kernels()
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.program_id(1).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    steps = tl.cdiv(K, BLOCK_K)
    total = plain_sums(x_ptr, w_ptr, rows, columns, M, N, K, 0, steps, BLOCK_K, WEIGHT_FIRST)
    if WEIGHT_FIRST:
        total = tl.trans(total)
    store_tile(out_ptr, total, bias_ptr, rows, columns, M, N, False, HAS_BIAS)


def sequential_linear(
    x: Tensor, packed: PackedLinear, out_dtype: torch.dtype | None = None
) -> Tensor:
    """Multiply as plain_linear, for SERVED only, which matrix instructions take unchanged."""
    y = x.new_empty(len(x), packed.out_features, dtype=out_dtype or x.dtype)
    multiply_into(y, x, packed, tile_of(len(x), packed, out_dtype))
    return y


def multiply_into(y: Tensor, x: Tensor, packed: PackedLinear, tile: Tile) -> None:
    """Fill y [M, N] by one kind of tile."""
    assert packed.scales is None
    assert x.dtype is packed.data.dtype is SERVED
    assert x.is_contiguous()
    assert packed.data.is_contiguous()
    if len(x) == 0:
        return
    grid = triton.cdiv(len(x), tile.rows), triton.cdiv(packed.out_features, tile.columns)
    _sequential_linear_kernel[grid](
        y,
        x,
        packed.data,
        packed.bias,
        len(x),
        packed.out_features,
        packed.in_features,
        WEIGHT_FIRST=tile.weight_first,
        BLOCK_M=tile.rows,
        BLOCK_N=tile.columns,
        BLOCK_K=tile.depth,
        HAS_BIAS=packed.bias is not None,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )


def tile_of(rows: int, packed: PackedLinear, out_dtype: torch.dtype | None = None) -> Tile:
    """Choose a tile by the number of rows, and by whether the weight is wide.

    Wide results are logits, of more rows than any step that is run to compile kernels; they have
    one tile.
    """
    if out_dtype is torch.float32:
        return _LOGITS
    last = _BUCKETS[-1]
    bucket = next((bucket for bucket in _BUCKETS[:-1] if rows <= bucket.rows), last)
    return bucket.wide if packed.out_features >= _WIDE else bucket.narrow
