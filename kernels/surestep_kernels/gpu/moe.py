"""Routed experts in Triton: products of many small matrices in one launch each.

A pair is a token and one of its experts. The pairs of each expert are listed and cut into tiles, of
which there are at most as many as shapes tell; a program multiplies one tile by some columns of its
expert. Weights are found by address, so that experts lie wherever they were loaded. All tiles have
one size and each pair a place of its own, from which a token's experts are added in order at last:
a token does not depend on its neighbours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from surestep_kernels.linear import PackedLinear, WeightFormat
from surestep_kernels.moe import PackedExperts, moe_reference, pack_experts_reference

from .linear import converts_fp8, linear, padded_group, split_sums
from .moe_tiles import BLOCK_M, Tiles, cut_tiles
from .plain_linear import plain_sums
from .silu_and_mul import silu_and_mul

_BLOCK_N, _BLOCK_K, _BLOCK_H = 64, 64, 1024


@triton.jit
def _gate(x, dtype: tl.constexpr):
    """silu of the first half of the columns times the second, as in silu_and_mul."""
    halves = x.to(dtype).to(tl.float32).reshape(x.shape[0], 2, x.shape[1] // 2)
    gate, up = halves.permute(0, 2, 1).split()
    return (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32) * up


@triton.jit(do_not_specialize=["capacity", "num_lines"])
def _experts_kernel(
    out_ptr,  # [P, N], or [P, N / 2] if GATED
    x_ptr,  # [num_lines, K]
    addresses_ptr,  # i64[3, E] of weights [N, K], or of codes, scales and zeros
    pairs_ptr,  # i32[E, capacity]
    counts_ptr,  # i32[E]
    experts_ptr,  # i32[B]
    firsts_ptr,  # i32[B]
    capacity,
    num_lines,
    N,
    K,
    E: tl.constexpr,
    PAIRS_PER_LINE: tl.constexpr,  # of x
    GATED: tl.constexpr,
    GROUP: tl.constexpr,  # as in linear.py; 0: the weights are plain
    INT4: tl.constexpr,
    NATIVE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    expert = tl.load(experts_ptr + tl.program_id(0)).to(tl.int64)
    if expert >= E:
        return
    listed = tl.load(firsts_ptr + tl.program_id(0)) + tl.arange(0, BLOCK_M)
    mask = listed < tl.load(counts_ptr + expert)
    pair = tl.load(pairs_ptr + expert * capacity + listed, mask=mask, other=0).to(tl.int64)
    lines = tl.where(mask, pair // PAIRS_PER_LINE, num_lines)
    column, width = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N), N
    weight_columns = column
    if GATED:  # half of the columns are gates, the others what they gate
        column, width = tl.program_id(1) * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2), N // 2
        j = tl.arange(0, BLOCK_N)
        weight_columns = tl.program_id(1) * (BLOCK_N // 2) + j % (BLOCK_N // 2)
        weight_columns += j // (BLOCK_N // 2) * width
    weight_columns, at = weight_columns.to(tl.int64), addresses_ptr + expert
    if GROUP:
        codes, scales = tl.load(at).to(tl.pointer_type(tl.uint8)), tl.load(at + E)
        scales = tl.multiple_of(scales.to(tl.pointer_type(tl.float32)), 16)
        zeros, groups = tl.load(at + 2 * E).to(tl.pointer_type(tl.uint8)), tl.cdiv(K, GROUP)
        out = split_sums(
            x_ptr, tl.multiple_of(codes, 16), scales, zeros, lines, weight_columns, num_lines, N, K,
            0, groups, groups, GROUP, BLOCK_K, INT4, NATIVE,
        )  # fmt: skip
    else:
        weight = tl.multiple_of(tl.load(at).to(x_ptr.dtype), 16)
        out = plain_sums(
            x_ptr, weight, lines, weight_columns, num_lines, N, K, 0, tl.cdiv(K, BLOCK_K), BLOCK_K
        )  # fmt: skip
    if GATED:
        out = _gate(out, out_ptr.dtype.element_ty)
    to = out_ptr + pair[:, None] * width + column[None, :]
    tl.store(to, out.to(out_ptr.dtype.element_ty), mask=mask[:, None] & (column < width)[None, :])


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
    """Note where the weights lie. Experts that are not alike are run one at a time."""
    packed = pack_experts_reference(gate_up, down, first)
    if not all(_alike(linear, like[0]) for like in (gate_up, down) for linear in like):
        return packed
    addresses = [[_addresses(linear) for linear in linears] for linears in (gate_up, down)]
    table = torch.tensor(addresses, device=down[0].data.device)  # [2, E, 3]
    return replace(packed, addresses=table.transpose(1, 2).contiguous())


def _alike(packed: PackedLinear, other: PackedLinear) -> bool:
    layouts = ((p.format, p.group_size, p.data.shape, p.bias is None) for p in (packed, other))
    return len({*layouts}) == 1 and packed.bias is None


def _addresses(packed: PackedLinear) -> tuple[int, int, int]:
    """Of weights, scales and zeros; 0 for what there is not."""
    parts = packed.data, packed.scales, packed.zeros
    assert all(part is None or part.is_contiguous() for part in parts)
    assert all(part is None or part.data_ptr() % 16 == 0 for part in parts)
    data, scales, zeros = (0 if part is None else part.data_ptr() for part in parts)
    return data, scales, zeros


def moe(total: Tensor, x: Tensor, weights: Tensor, experts: Tensor, packed: PackedExperts) -> None:
    """See moe_reference."""
    if packed.addresses is None:
        moe_reference(total, x, weights, experts, packed, linear=linear, silu_and_mul=silu_and_mul)
        return
    (tokens, width), top_k = x.shape, experts.shape[1]
    num_experts, inner = len(packed.down), packed.down[0].in_features
    assert all(tensor.is_contiguous() for tensor in (total, x, weights, experts))
    assert total.dtype is weights.dtype is torch.float32
    assert total.shape == x.shape
    if tokens == 0:
        return
    tiles = cut_tiles(experts, packed.first, num_experts)
    gate_up, down = packed.addresses
    gated = x.new_empty(tokens * top_k, inner)
    _run(gated, x, packed.gate_up[0], gate_up, tiles, gated=True)
    made = x.new_empty(tokens * top_k, width, dtype=torch.float32)
    _run(made, gated, packed.down[0], down, tiles, gated=False)
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


def _run(
    out: Tensor, x: Tensor, like: PackedLinear, addresses: Tensor, tiles: Tiles, *, gated: bool
) -> None:
    """Multiply the line of x of every pair by the weight of its expert, all of them like one."""
    assert x.shape[1] == like.in_features
    assert like.scales is not None or like.data.dtype is x.dtype
    grid = len(tiles.experts), triton.cdiv(like.out_features, _BLOCK_N)
    _experts_kernel[grid](
        out,
        x,
        addresses,
        *tiles,
        tiles.pairs.shape[1],
        len(x),
        like.out_features,
        like.in_features,
        E=len(tiles.counts),
        PAIRS_PER_LINE=len(out) // len(x),
        GATED=gated,
        GROUP=like.group_size,
        INT4=like.format is WeightFormat.INT4,
        NATIVE=converts_fp8(x.device),
        BLOCK_M=BLOCK_M,
        BLOCK_N=_BLOCK_N,
        BLOCK_K=padded_group(like.group_size) if like.group_size else _BLOCK_K,
        num_stages=4,
    )
