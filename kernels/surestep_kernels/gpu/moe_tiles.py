"""Which tokens each expert has, in tiles of one size, found out on the device."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .dependent_launch import DependentKernel, wait_for_earlier_kernels

_BLOCK_P = 1024


class Tiles(NamedTuple):
    """Which pairs each expert has, and who works on them."""

    pairs: Tensor  # i32[E, T] of each expert, ascending
    counts: Tensor  # i32[E]
    experts: Tensor  # i32[B] of each tile; E where there is nothing to do
    firsts: Tensor  # i32[B] first of the expert's pairs that is in the tile


@DependentKernel
@triton.jit(do_not_specialize=["num_pairs", "capacity"])
def _list_pairs_kernel(
    pairs_ptr,  # i32[E, capacity]
    counts_ptr,  # i32[E]
    experts_ptr,  # i64[num_pairs]
    num_pairs,
    capacity,
    first,
    BLOCK: tl.constexpr,
):
    wait_for_earlier_kernels()
    expert = tl.program_id(0).to(tl.int64)
    count = tl.zeros((), tl.int32)
    for start in range(0, num_pairs, BLOCK):
        pair = start + tl.arange(0, BLOCK)
        found = tl.load(experts_ptr + pair, mask=pair < num_pairs, other=-1) == first + expert
        place = count + tl.cumsum(found.to(tl.int32), axis=0) - 1
        to = pairs_ptr + expert * capacity + place
        tl.store(to, pair, mask=found & (place < capacity))
        count += tl.sum(found.to(tl.int32), axis=0)
    tl.store(counts_ptr + expert, tl.minimum(count, capacity))


@DependentKernel
@triton.jit
def _cut_tiles_kernel(
    experts_ptr,  # i32[B]
    firsts_ptr,  # i32[B]
    counts_ptr,  # i32[E]
    E: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    wait_for_earlier_kernels()
    tile, expert = tl.program_id(0), tl.arange(0, BLOCK_E)
    tiles = tl.cdiv(tl.load(counts_ptr + expert, mask=expert < E, other=0), BLOCK_M)
    end = tl.cumsum(tiles, axis=0)
    mine = (end > tile) & (end - tiles <= tile)
    tl.store(experts_ptr + tile, E - tl.sum(tl.where(mine, E - expert, 0), axis=0))
    index = tl.sum(tl.where(mine, tile - (end - tiles), 0), axis=0)
    tl.store(firsts_ptr + tile, index * BLOCK_M)


def cut_tiles(experts: Tensor, first: int, num_experts: int, size: int) -> Tiles:
    """Tiles of `size` pairs for experts i64[T, k], of which first, first + 1, .. are there."""
    tokens, top_k = experts.shape
    num_pairs = tokens * top_k
    num_tiles = num_pairs // size + min(num_experts, num_pairs)
    new = torch.empty((2 * num_tiles + num_experts,), dtype=torch.int32, device=experts.device)
    pairs = torch.empty((num_experts, tokens), dtype=torch.int32, device=experts.device)
    tile_experts, firsts, counts = new.split([num_tiles, num_tiles, num_experts])
    _list_pairs_kernel[(num_experts,)](
        pairs, counts, experts, num_pairs, tokens, first, BLOCK=_BLOCK_P
    )
    _cut_tiles_kernel[(num_tiles,)](
        tile_experts,
        firsts,
        counts,
        E=num_experts,
        BLOCK_E=triton.next_power_of_2(num_experts),
        BLOCK_M=size,
        num_warps=1,
    )
    return Tiles(pairs, counts, tile_experts, firsts)
