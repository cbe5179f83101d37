"""The tokens of each expert, in tiles of one size, computed on the device."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from surestep_kernels.columns.gpu.dependent_launch import DependentKernel, wait_for_earlier_kernels

_BLOCK_P = 1024
_LEAST_BINS = 128  # of a histogram: one for each thread


class ExpertTiles(NamedTuple):
    """The pairs of each expert, and the tiles they are cut into."""

    pairs: Tensor  # i32[E, T] of each expert, ascending
    counts: Tensor  # i32[E]
    experts: Tensor  # i32[B] of each tile; E where there is nothing to do
    firsts: Tensor  # i32[B] first of the expert's pairs that is in the tile


@DependentKernel
@triton.jit(do_not_specialize=["num_pairs", "capacity", "num_tiles"])
def _cut_tiles_kernel(
    pairs_ptr,  # i32[E, capacity]
    counts_ptr,  # i32[E]
    tile_experts_ptr,  # i32[num_tiles]
    firsts_ptr,  # i32[num_tiles]
    experts_ptr,  # i64[num_pairs]
    num_pairs,
    capacity,
    num_tiles,
    first,
    E: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_M: tl.constexpr,  # pairs of a tile
):
    """A program lists the pairs of its expert. It counts all pairs, to know the tiles before its
    own."""
    wait_for_earlier_kernels()
    expert, every = tl.program_id(0), tl.arange(0, BLOCK_E)
    counts, to = tl.zeros((BLOCK_E,), tl.int32), pairs_ptr + expert.to(tl.int64) * capacity
    for start in range(0, num_pairs, BLOCK_P):
        pair = start + tl.arange(0, BLOCK_P)
        of = tl.load(experts_ptr + pair, mask=pair < num_pairs, other=-1) - first
        found = of == expert
        count = tl.sum(tl.where(every == expert, counts, 0), axis=0)
        place = count + tl.cumsum(found.to(tl.int32), axis=0) - 1
        tl.store(to + place, pair, mask=found & (place < capacity))
        counts += tl.histogram(of.to(tl.int32), BLOCK_E, mask=(of >= 0) & (of < E))
    counts = tl.minimum(counts, capacity)
    tl.store(counts_ptr + every, counts, mask=every == expert)
    tiles = tl.cdiv(counts, BLOCK_M)
    mine = tl.sum(tl.where(every == expert, tiles, 0), axis=0)
    begin = tl.sum(tl.where(every < expert, tiles, 0), axis=0)
    # The last program marks the remaining tiles as empty.
    end = tl.where(expert == E - 1, num_tiles, begin + mine)
    for start in range(begin, end, BLOCK_E):
        tile = start + every
        name = tl.where(tile < begin + mine, expert, E)
        tl.store(tile_experts_ptr + tile, name, mask=tile < end)
        tl.store(firsts_ptr + tile, (tile - begin) * BLOCK_M, mask=tile < end)


def cut_tiles(experts: Tensor, first: int, num_experts: int, size: int) -> ExpertTiles:
    """Cut experts i64[T, k], of which first, first + 1, .. exist, into tiles of `size` pairs."""
    tokens, top_k = experts.shape
    num_pairs = tokens * top_k
    num_tiles = num_pairs // size + min(num_experts, num_pairs)
    # Each begins at a multiple of 16 bytes: kernels are compiled for how pointers are aligned.
    room = -(-num_tiles // 4) * 4
    new = torch.empty((2 * room + num_experts,), dtype=torch.int32, device=experts.device)
    pairs = torch.empty((num_experts, tokens), dtype=torch.int32, device=experts.device)
    tile_experts, firsts, counts = new.split([room, room, num_experts])
    tile_experts, firsts = tile_experts[:num_tiles], firsts[:num_tiles]
    _cut_tiles_kernel[(num_experts,)](
        pairs,
        counts,
        tile_experts,
        firsts,
        experts,
        num_pairs,
        tokens,
        num_tiles,
        first,
        E=num_experts,
        BLOCK_E=max(_LEAST_BINS, triton.next_power_of_2(num_experts)),
        BLOCK_P=_BLOCK_P,
        BLOCK_M=size,
    )
    return ExpertTiles(pairs, counts, tile_experts, firsts)
