"""Routed experts in Triton: products of many small matrices in one launch each.

A pair is a token and one of its experts. The pairs of each expert are listed and cut into tiles of
BLOCK_M, of which there are at most as many as shapes tell; a program multiplies one tile by some
columns of its expert. Weights are found by address, so that experts lie wherever they were loaded.
All tiles have one size and each pair a place of its own, from which a token's experts are added in
order at last: a token does not depend on its neighbours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from surestep_kernels.linear import PackedLinear
from surestep_kernels.moe import PackedExperts, moe_reference, pack_experts_reference

from .linear import linear

_BLOCK_M, _BLOCK_N, _BLOCK_K = 16, 64, 64
_BLOCK_P, _BLOCK_H = 1024, 1024


class Tiles(NamedTuple):
    """Which pairs each expert has, and who works on them."""

    pairs: Tensor  # i32[E, T] of each expert, ascending
    counts: Tensor  # i32[E]
    experts: Tensor  # i32[B] of each tile; E where there is nothing to do
    firsts: Tensor  # i32[B] first of the expert's pairs that is in the tile


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


@triton.jit
def _cut_tiles_kernel(
    experts_ptr,  # i32[B]
    firsts_ptr,  # i32[B]
    counts_ptr,  # i32[E]
    E: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    tile, expert = tl.program_id(0), tl.arange(0, BLOCK_E)
    tiles = tl.cdiv(tl.load(counts_ptr + expert, mask=expert < E, other=0), BLOCK_M)
    end = tl.cumsum(tiles, axis=0)
    mine = (end > tile) & (end - tiles <= tile)
    tl.store(experts_ptr + tile, E - tl.sum(tl.where(mine, E - expert, 0), axis=0))
    index = tl.sum(tl.where(mine, tile - (end - tiles), 0), axis=0)
    tl.store(firsts_ptr + tile, index * BLOCK_M)


@triton.jit
def _product(x, x_mask, weight, columns, inside, K, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr):
    """Rows at x [M] times lines `columns` of the weight [N, K]: f32[M, columns]."""
    acc = tl.zeros((x.shape[0], columns.shape[0]), tl.float32)
    for start in range(0, K, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        rows = tl.load(x[:, None] + k[None, :], mask=x_mask[:, None] & (k < K)[None, :], other=0.0)
        at = weight + columns[:, None] * K + k[None, :]
        lines = tl.load(at, mask=inside[:, None] & (k < K)[None, :], other=0.0)
        acc = tl.dot(rows, tl.trans(lines), acc, input_precision=PRECISION)
    return acc


@triton.jit(do_not_specialize=["capacity"])
def _experts_kernel(
    out_ptr,  # [P, N], or [P, N / 2] if GATED
    x_ptr,  # [P / PAIRS_PER_LINE, K]
    addresses_ptr,  # i64[E] of weights [N, K]
    pairs_ptr,  # i32[E, capacity]
    counts_ptr,  # i32[E]
    experts_ptr,  # i32[B]
    firsts_ptr,  # i32[B]
    capacity,
    N,
    K,
    E: tl.constexpr,
    PAIRS_PER_LINE: tl.constexpr,  # of x
    GATED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
):
    expert = tl.load(experts_ptr + tl.program_id(0)).to(tl.int64)
    if expert >= E:
        return
    listed = tl.load(firsts_ptr + tl.program_id(0)) + tl.arange(0, BLOCK_M)
    mask = listed < tl.load(counts_ptr + expert)
    pair = tl.load(pairs_ptr + expert * capacity + listed, mask=mask, other=0).to(tl.int64)
    x = x_ptr + pair // PAIRS_PER_LINE * K
    weight = tl.multiple_of(tl.load(addresses_ptr + expert).to(x_ptr.dtype), 16)
    j = tl.arange(0, BLOCK_N).to(tl.int64)
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    if GATED:  # half of the columns are gates, the others belong to them
        HALF: tl.constexpr = BLOCK_N // 2
        column, width = tl.program_id(1) * HALF + j % HALF, N // 2
        acc = _product(
            x, mask, weight, column + j // HALF * width, column < width, K, BLOCK_K, PRECISION
        )
        halves = acc.to(dtype).to(tl.float32).reshape(BLOCK_M, 2, HALF).permute(0, 2, 1)
        gate, up = halves.split()
        out = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32) * up
        column = tl.program_id(1) * HALF + tl.arange(0, HALF)
    else:
        column, width = tl.program_id(1) * BLOCK_N + j, N
        out = _product(x, mask, weight, column, column < width, K, BLOCK_K, PRECISION)
    to = out_ptr + pair[:, None] * width + column[None, :]
    tl.store(to, out.to(dtype), mask=mask[:, None] & (column < width)[None, :])


@triton.jit
def _combine_kernel(
    total_ptr,  # f32[T, H]
    made_ptr,  # f32[T, TOP_K, H]
    weights_ptr,  # f32[T, TOP_K]
    experts_ptr,  # i64[T, TOP_K]
    first,
    H,
    E: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    token, choice = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK_K)
    column = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    at, some = token * TOP_K + choice, choice < TOP_K
    weights = tl.load(weights_ptr + at, mask=some, other=0.0)
    NONE: tl.constexpr = 1 << 40
    left = tl.load(experts_ptr + at, mask=some, other=NONE) - first
    left = tl.where((left >= 0) & (left < E), left, NONE)
    total = tl.load(total_ptr + token * H + column, mask=column < H, other=0.0)
    for _ in range(TOP_K):
        lowest = tl.min(left, axis=0)
        which = tl.min(tl.where(left == lowest, choice, BLOCK_K), axis=0)
        weight = tl.sum(tl.where(choice == which, weights, 0.0), axis=0)
        inside = column < tl.where(lowest < E, H, 0)
        made = tl.load(made_ptr + (token * TOP_K + which) * H + column, mask=inside, other=0.0)
        total = tl.where(inside, total + made * weight, total)
        left = tl.where(choice == which, NONE, left)
    tl.store(total_ptr + token * H + column, total, mask=column < H)


def pack_experts(
    gate_up: Sequence[PackedLinear], down: Sequence[PackedLinear], first: int
) -> PackedExperts:
    """Note where the weights lie; quantised ones are run one expert at a time."""
    packed = pack_experts_reference(gate_up, down, first)
    if any(linear.scales is not None for linear in (*gate_up, *down)):
        return packed
    assert all(_is_like(linear, like[0]) for like in (gate_up, down) for linear in like)
    addresses = [[linear.data.data_ptr() for linear in linears] for linears in (gate_up, down)]
    return replace(packed, addresses=torch.tensor(addresses, device=down[0].data.device))


def _is_like(packed: PackedLinear, other: PackedLinear) -> bool:
    data = packed.data
    same = data.shape == other.data.shape and data.dtype is other.data.dtype
    return same and packed.bias is None and data.is_contiguous() and data.data_ptr() % 16 == 0


def moe(total: Tensor, x: Tensor, weights: Tensor, experts: Tensor, packed: PackedExperts) -> None:
    """See moe_reference."""
    if packed.addresses is None:
        moe_reference(total, x, weights, experts, packed, linear=linear)
        return
    (tokens, width), top_k = x.shape, experts.shape[1]
    num_experts, inner = len(packed.down), packed.down[0].in_features
    assert all(tensor.is_contiguous() for tensor in (total, x, weights, experts))
    assert total.dtype is weights.dtype is torch.float32
    assert total.shape == x.shape
    assert x.dtype is packed.down[0].data.dtype
    if tokens == 0:
        return
    tiles = _cut_tiles(experts, packed)
    gate_up, down = packed.addresses
    gated = _run(x, gate_up, tiles, tokens * top_k, 2 * inner, x.dtype, gated=True)
    made = _run(gated, down, tiles, tokens * top_k, width, torch.float32, gated=False)
    _combine_kernel[tokens, triton.cdiv(width, _BLOCK_H)](
        total,
        made,
        weights,
        experts,
        packed.first,
        width,
        E=num_experts,
        TOP_K=top_k,
        BLOCK_K=triton.next_power_of_2(top_k),
        BLOCK_H=_BLOCK_H,
    )


def _cut_tiles(experts: Tensor, packed: PackedExperts) -> Tiles:
    (tokens, top_k), num_experts = experts.shape, len(packed.down)
    num_pairs = tokens * top_k
    num_tiles = num_pairs // _BLOCK_M + min(num_experts, num_pairs)
    new = torch.empty((2 * num_tiles + num_experts,), dtype=torch.int32, device=experts.device)
    pairs = torch.empty((num_experts, tokens), dtype=torch.int32, device=experts.device)
    tile_experts, firsts, counts = new.split([num_tiles, num_tiles, num_experts])
    _list_pairs_kernel[(num_experts,)](
        pairs, counts, experts, num_pairs, tokens, packed.first, BLOCK=_BLOCK_P
    )
    _cut_tiles_kernel[(num_tiles,)](
        tile_experts,
        firsts,
        counts,
        E=num_experts,
        BLOCK_E=triton.next_power_of_2(num_experts),
        BLOCK_M=_BLOCK_M,
        num_warps=1,
    )
    return Tiles(pairs, counts, tile_experts, firsts)


def _run(
    x: Tensor, addresses: Tensor, tiles: Tiles, num_pairs: int, outputs: int, dtype: torch.dtype,
    *, gated: bool,
) -> Tensor:  # fmt: skip
    """Multiply the line of x of every pair by its expert's weight, whose `outputs` may be gated."""
    width = outputs // 2 if gated else outputs
    out = x.new_empty(num_pairs, width, dtype=dtype)
    grid = len(tiles.experts), triton.cdiv(outputs, _BLOCK_N)
    _experts_kernel[grid](
        out,
        x,
        addresses,
        *tiles,
        tiles.pairs.shape[1],
        outputs,
        x.shape[1],
        E=len(tiles.counts),
        PAIRS_PER_LINE=num_pairs // len(x),
        GATED=gated,
        BLOCK_M=_BLOCK_M,
        BLOCK_N=_BLOCK_N,
        BLOCK_K=_BLOCK_K,
        PRECISION="ieee" if x.dtype is torch.float32 else "tf32",
        num_stages=4,
    )
    return out
