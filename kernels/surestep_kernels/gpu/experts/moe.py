"""Routed experts in Triton: products of many small matrices in one launch each.

A pair is a token and one of its experts. The pairs of each expert are listed and cut into tiles,
whose number is bounded by the shapes; a program multiplies one tile by some columns of its expert.
Weights are found by address, so that experts may be anywhere in memory. Each pair has its own place
in the output, from which a token's experts are added in order at the end.

Products are W x^T, as in linear.py: the weights are the operand of 64 rows, so that a tile of few
pairs wastes little, and one of many uses the same instruction in the same order, m64n64k16 on
sm_90. So a token does not depend on its neighbours. Where instructions of other widths were found
to add alike, tiles are as wide as the mean load of an expert, which the host knows from shapes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from surestep_kernels.gpu.launch.dependent_launch import DependentKernel, wait_for_earlier_kernels
from surestep_kernels.gpu.products.fp8_rows import Factor, quantize_rows
from surestep_kernels.gpu.products.linear import ONE_WIDTH, linear, quantized_sums
from surestep_kernels.gpu.products.plain_linear import plain_sums
from surestep_kernels.gpu.products.weight_tile import ROW_BLOCK, padded_group, places
from surestep_kernels.gpu.rowwise.silu_and_mul import silu_and_mul
from surestep_kernels.ops.linear import PackedLinear, WeightFormat
from surestep_kernels.ops.moe import PackedExperts, moe_reference, pack_experts_reference

from .moe_tiles import ExpertTiles, cut_tiles

_BLOCK_K, _BLOCK_H = 64, 1024
_FP32_WIDTH = 16  # no instruction to keep
_MANY = 64  # pairs of an expert that its weights are worth wider tiles for


@triton.jit
def _gate(x, dtype: tl.constexpr):
    """Return silu of the first half of the columns times the second, as in silu_and_mul."""
    halves = x.to(dtype).to(tl.float32).reshape(x.shape[0], 2, x.shape[1] // 2)
    gate, up = halves.permute(0, 2, 1).split()
    return (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32) * up


@DependentKernel
@triton.jit(do_not_specialize=["capacity", "num_lines"])
def _experts_kernel(
    out_ptr,  # [P, N], or [P, N / 2] if GATED
    x_ptr,  # [num_lines, K], or codes: see linear.py
    x_scales_ptr,  # f32[groups, num_lines]; of codes only
    addresses_ptr,  # i64[2, E] of weights [N, K], or of words and scales
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
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    wait_for_earlier_kernels()
    expert = tl.load(experts_ptr + tl.program_id(0)).to(tl.int64)
    if expert >= E:
        return
    listed = tl.load(firsts_ptr + tl.program_id(0)) + tl.arange(0, BLOCK_M)
    mask = listed < tl.load(counts_ptr + expert)
    pair = tl.load(pairs_ptr + expert * capacity + listed, mask=mask, other=0).to(tl.int64)
    lines = tl.where(mask, pair // PAIRS_PER_LINE, num_lines)
    # If GATED, half of a tile are gates and the other half what they gate, N / 2 further.
    PART: tl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N
    width = N // 2 if GATED else N
    j, begin = tl.arange(0, BLOCK_N), tl.program_id(1) * PART
    columns, at = (begin + j % PART + j // PART * width).to(tl.int64), addresses_ptr + expert
    if GROUP:
        words = tl.multiple_of(tl.load(at).to(tl.pointer_type(tl.int32)), 16)
        scales = tl.multiple_of(tl.load(at + E).to(tl.pointer_type(tl.int32)), 16)
        block, _ = places(BLOCK_N, BLOCK_K, INT4)
        block = begin // 16 + block % (PART // 16) + block // (PART // 16) * (width // 16)
        groups = tl.cdiv(K, GROUP)
        out = quantized_sums(
            x_ptr, x_scales_ptr, words, scales, lines, columns, block, num_lines, N, K,
            0, groups, groups, groups, GROUP, BLOCK_K, INT4, SPLITS=False,
        )  # fmt: skip
    else:
        weight = tl.multiple_of(tl.load(at).to(x_ptr.dtype), 16)
        steps = tl.cdiv(K, BLOCK_K)
        out = plain_sums(
            x_ptr, weight, lines, columns, num_lines, N, K, 0, steps, BLOCK_K, WEIGHT_FIRST=True
        )  # fmt: skip
    out = tl.trans(out)
    if GATED:
        out = _gate(out, out_ptr.dtype.element_ty)
    column = begin + tl.arange(0, PART)
    to = out_ptr + pair[:, None] * width + column[None, :]
    tl.store(to, out.to(out_ptr.dtype.element_ty), mask=mask[:, None] & (column < width)[None, :])


@triton.jit
def add_experts(
    total, made_ptr, weights_ptr, experts_ptr, token, column, first, H, E: tl.constexpr,
    TOP_K: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Add the outputs of a token's experts to its columns, in order. No load waits for a sum."""
    choice = tl.arange(0, BLOCK_K)
    at, some = token * TOP_K + choice, choice < TOP_K
    weights = tl.load(weights_ptr + at, mask=some, other=0.0)
    NONE: tl.constexpr = 1 << 40
    left = tl.load(experts_ptr + at, mask=some, other=NONE) - first
    left = tl.where((left >= 0) & (left < E), left, NONE)
    for _ in tl.static_range(TOP_K):
        lowest = tl.min(left, axis=0)
        which = tl.min(tl.where(left == lowest, choice, BLOCK_K), axis=0)
        weight = tl.sum(tl.where(choice == which, weights, 0.0), axis=0)
        inside = column < tl.where(lowest < E, H, 0)
        made = tl.load(made_ptr + (token * TOP_K + which) * H + column, mask=inside, other=0.0)
        total = tl.where(inside, total + made * weight, total)
        left = tl.where(choice == which, NONE, left)
    return total


@DependentKernel
@triton.jit
def _combine_kernel(
    total_ptr,  # f32[T, H]
    made_ptr,  # f32[T, TOP_K, H]
    weights_ptr,  # f32[T, TOP_K]
    experts_ptr,  # i64[T, TOP_K]
    first, H,
    E: tl.constexpr, TOP_K: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    wait_for_earlier_kernels()
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    total = tl.load(total_ptr + token * H + column, mask=column < H, other=0.0)
    total = add_experts(
        total, made_ptr, weights_ptr, experts_ptr, token, column, first, H, E, TOP_K, BLOCK_K
    )
    tl.store(total_ptr + token * H + column, total, mask=column < H)


def pack_experts(
    gate_up: Sequence[PackedLinear], down: Sequence[PackedLinear], first: int
) -> PackedExperts:
    """Record the addresses of the weights. Experts with different layouts are run one at a time.

    So are quantised ones whose gates do not fill blocks of rows, which no published model has.
    """
    packed = pack_experts_reference(gate_up, down, first)
    whole = gate_up[0].scales is None or down[0].in_features % ROW_BLOCK == 0
    alike = all(_alike(linear, like[0]) for like in (gate_up, down) for linear in like)
    if not (whole and alike):
        return packed
    addresses = [[_addresses(linear) for linear in linears] for linears in (gate_up, down)]
    table = torch.tensor(addresses, device=down[0].data.device)  # [2, E, 2]
    return replace(packed, addresses=table.transpose(1, 2).contiguous())


def _alike(packed: PackedLinear, other: PackedLinear) -> bool:
    layouts = ((p.format, p.group_size, p.data.shape, p.bias is None) for p in (packed, other))
    return len({*layouts}) == 1 and packed.bias is None


def _addresses(packed: PackedLinear) -> tuple[int, int]:
    """Return the addresses of weights and scales; 0 for what does not exist."""
    parts = packed.data, packed.scales
    assert all(part is None or part.is_contiguous() for part in parts)
    assert all(part is None or part.data_ptr() % 16 == 0 for part in parts)
    data, scales = (0 if part is None else part.data_ptr() for part in parts)
    return data, scales


class _Size(NamedTuple):
    """The size of tiles."""

    pairs: int
    columns: int
    num_warps: int


def choose_size(pairs: int, experts: int, dtype: torch.dtype, widths: tuple[int, ...]) -> _Size:
    """Choose by the mean number of pairs of an expert; `widths` as in linear.py."""
    load = triton.cdiv(pairs, experts)
    width = next((width for width in widths if width >= load), widths[-1])
    if dtype is torch.float32:
        return _Size(_FP32_WIDTH, 64, 4)
    return _Size(width, 128, 8) if load >= _MANY else _Size(width, 64, 4)


def moe(
    total: Tensor,
    x: Tensor,
    weights: Tensor,
    experts: Tensor,
    packed: PackedExperts,
    widths: tuple[int, ...] = ONE_WIDTH,
    *,
    fp8_rows: bool = False,
) -> None:
    """Compute moe_reference; `widths` and `fp8_rows` are as in quantized_partials."""
    if packed.addresses is None:
        one = partial(linear, fp8_rows=fp8_rows)
        moe_reference(total, x, weights, experts, packed, linear=one, silu_and_mul=silu_and_mul)
        return
    (tokens, width), top_k = x.shape, experts.shape[1]
    assert all(tensor.is_contiguous() for tensor in (total, weights))
    assert total.dtype is weights.dtype is torch.float32
    assert total.shape == x.shape
    if tokens == 0:
        return
    made = run_experts(x, experts, packed, widths, fp8_rows=fp8_rows)
    _combine_kernel[tokens, triton.cdiv(width, _BLOCK_H)](
        *(total, made, weights, experts, packed.first, width),
        E=len(packed.down),
        TOP_K=top_k,
        BLOCK_K=triton.next_power_of_2(top_k),
        BLOCK_H=_BLOCK_H,
    )


def run_experts(
    x: Tensor,
    experts: Tensor,
    packed: PackedExperts,
    widths: tuple[int, ...] = ONE_WIDTH,
    *,
    fp8_rows: bool = False,
) -> Tensor:
    """Return the outputs f32[T * k, H] of the experts i64[T, k], packed together, for x [T, H].

    Lines of experts that are not packed are not written.
    """
    assert packed.addresses is not None
    assert x.is_contiguous()
    assert experts.is_contiguous()
    pairs, num_experts, inner = experts.numel(), len(packed.down), packed.down[0].in_features
    size = choose_size(pairs, num_experts, x.dtype, widths)
    tiles = cut_tiles(experts, packed.first, num_experts, size.pairs)
    gate_up, down = packed.addresses
    gated = x.new_empty(pairs, inner)
    run = partial(_run, tiles=tiles, size=size, fp8_rows=fp8_rows)
    run(gated, x, packed.gate_up[0], gate_up, gated=True)
    made = x.new_empty(pairs, x.shape[1], dtype=torch.float32)
    run(made, gated, packed.down[0], down, gated=False)
    return made


def _run(
    out: Tensor,
    x: Tensor,
    like: PackedLinear,
    addresses: Tensor,
    *,
    tiles: ExpertTiles,
    size: _Size,
    gated: bool,
    fp8_rows: bool,
) -> None:
    """Multiply each pair's line of x by its expert's weight; all are laid out as `like`."""
    assert x.shape[1] == like.in_features
    assert like.scales is not None or like.data.dtype is x.dtype
    part = size.columns // 2 if gated else size.columns
    width = like.out_features // 2 if gated else like.out_features
    grid = len(tiles.experts), triton.cdiv(width, part)
    fp8_rows = fp8_rows and like.format is WeightFormat.FP8
    factor = quantize_rows(x, like.group_size) if fp8_rows else Factor(x, None)
    _experts_kernel[grid](
        out,
        *factor,
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
        BLOCK_M=size.pairs,
        BLOCK_N=size.columns,
        BLOCK_K=padded_group(like.group_size) if like.group_size else _BLOCK_K,
        num_warps=size.num_warps,
        num_stages=4,
    )
