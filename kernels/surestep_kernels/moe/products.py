"""The products of routed experts in Triton: those of many small matrices in one launch each.

A program multiplies one tile of an expert's pairs by some of its columns, adds the bias, and
applies the activation to gates. Weights are found by address, so that experts may be anywhere in
memory. Each pair, a token and one of its experts, has its own line in the output.

Products are W x^T, as in linear.py: the weights are the operand of 64 rows, so that a tile of few
pairs wastes little, and one of many uses the same instruction in the same order, m64n64k16 on
sm_90. So a token does not depend on its neighbours. Where instructions of other widths were found
to add alike, tiles are as wide as the mean load of an expert, which the host knows from shapes.

The heads of latent attention are multiplied alike: each by a weight of its own, all in one launch.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from surestep_kernels.add_adapters.triton import add_adapters
from surestep_kernels.clamped_swiglu.triton import clamped_swiglu, clamped_swiglu_of
from surestep_kernels.columns.gpu.dependent_launch import DependentKernel, wait_for_earlier_kernels
from surestep_kernels.linear import PackedHeads, PackedLinear, WeightFormat
from surestep_kernels.linear.plain import plain_sums
from surestep_kernels.linear.triton import ONE_WIDTH, quantized_sums
from surestep_kernels.linear.triton_fp8_rows import Factor, quantize_rows
from surestep_kernels.linear.weight_tile import MXFP4, padded_group, places
from surestep_kernels.silu_and_mul.triton import silu_and_mul, times_sigmoid

from .reference import ExpertAdapters, PackedExperts
from .tiles import ExpertTiles, cut_tiles

_BLOCK_K = 64
_FP32_WIDTH = 16  # no instruction to keep
_MANY = 64  # pairs of an expert that its weights are worth wider tiles for


@triton.jit
def _gate(x, limit, CLAMPED: tl.constexpr, dtype: tl.constexpr):
    """Apply the activation to gates, the first half of the columns, and ups, the second half."""
    halves = x.to(dtype).to(tl.float32).reshape(x.shape[0], 2, x.shape[1] // 2)
    gate, up = halves.permute(0, 2, 1).split()
    if CLAMPED:
        return clamped_swiglu_of(gate, up, limit)
    return times_sigmoid(gate, gate).to(dtype).to(tl.float32) * up


@triton.jit
def _quantized(
    x_ptr,
    x_scales_ptr,
    at,
    lines,
    columns,
    block,
    num_lines,
    N,
    K,
    E: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_K: tl.constexpr,
    FORMAT: tl.constexpr,
):
    """Return quantized_sums of the weight whose addresses are `at`."""
    words = tl.multiple_of(tl.load(at).to(tl.pointer_type(tl.int32)), 16)
    scale: tl.constexpr = tl.int16 if FORMAT == MXFP4 else tl.int32
    scales = tl.multiple_of(tl.load(at + E).to(tl.pointer_type(scale)), 16)
    groups = tl.cdiv(K, GROUP)
    return quantized_sums(
        x_ptr,
        x_scales_ptr,
        words,
        scales,
        lines,
        columns,
        block,
        num_lines,
        N,
        K,
        0,
        groups,
        groups,
        groups,
        GROUP,
        BLOCK_K,
        FORMAT,
        SPLITS=False,
    )


@DependentKernel
@triton.jit(do_not_specialize=["capacity", "num_lines"])
def _experts_kernel(
    out_ptr,  # [P, N], or [P, N / 2] if GATED
    x_ptr,  # [num_lines, K], or codes: see linear.py
    x_scales_ptr,  # f32[groups, num_lines]; of codes only
    addresses_ptr,  # i64[3, E] of weights [N, K] or words, of scales, of biases [N]
    pairs_ptr,  # i32[E, capacity]
    counts_ptr,  # i32[E]
    experts_ptr,  # i32[B]
    firsts_ptr,  # i32[B]
    capacity,
    num_lines,
    N,
    K,
    limit,  # CLAMPED only
    E: tl.constexpr,
    PAIRS_PER_LINE: tl.constexpr,  # of x
    GATED: tl.constexpr,
    CLAMPED: tl.constexpr,  # by clamped_swiglu, else silu_and_mul
    HAS_BIAS: tl.constexpr,
    GROUP: tl.constexpr,  # as in linear.py; 0: the weights are plain
    FORMAT: tl.constexpr,
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
        block, _ = places(BLOCK_N, BLOCK_K, FORMAT)
        block = begin // 16 + block % (PART // 16) + block // (PART // 16) * (width // 16)
        out = _quantized(
            x_ptr,
            x_scales_ptr,
            at,
            lines,
            columns,
            block,
            num_lines,
            N,
            K,
            E,
            GROUP,
            BLOCK_K,
            FORMAT,
        )
    else:
        weight = tl.multiple_of(tl.load(at).to(x_ptr.dtype), 16)
        steps = tl.cdiv(K, BLOCK_K)
        out = plain_sums(
            x_ptr, weight, lines, columns, num_lines, N, K, 0, steps, BLOCK_K, WEIGHT_FIRST=True
        )
    if HAS_BIAS:
        bias_ptr = tl.load(at + 2 * E).to(x_ptr.dtype)
        out += tl.load(bias_ptr + columns, mask=columns < N, other=0.0).to(tl.float32)[:, None]
    out = tl.trans(out)
    if GATED:
        out = _gate(out, limit, CLAMPED, out_ptr.dtype.element_ty)
    column = begin + tl.arange(0, PART)
    to = out_ptr + pair[:, None] * width + column[None, :]
    tl.store(to, out.to(out_ptr.dtype.element_ty), mask=mask[:, None] & (column < width)[None, :])


@DependentKernel
@triton.jit(do_not_specialize=["M"])
def _multiply_heads_kernel(
    out_ptr,  # [M, H, N]
    x_ptr,  # [M, H, K], or codes: see linear.py
    x_scales_ptr,  # f32[groups, M * H]; of codes only
    addresses_ptr,  # i64[3, H]: see _experts_kernel
    M,
    N,
    K,
    H: tl.constexpr,
    GROUP: tl.constexpr,  # as in linear.py; 0: the weights are plain
    FORMAT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    wait_for_earlier_kernels()
    row, head = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M), tl.program_id(1)
    lines, at = tl.where(row < M, row * H + head, M * H), addresses_ptr + head
    columns = tl.program_id(2).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    if GROUP:
        block, _ = places(BLOCK_N, BLOCK_K, FORMAT)
        block += tl.program_id(2) * (BLOCK_N // 16)
        out = _quantized(
            x_ptr, x_scales_ptr, at, lines, columns, block, M * H, N, K, H, GROUP, BLOCK_K, FORMAT
        )
    else:
        weight = tl.multiple_of(tl.load(at).to(x_ptr.dtype), 16)
        steps = tl.cdiv(K, BLOCK_K)
        out = plain_sums(
            x_ptr, weight, lines, columns, M * H, N, K, 0, steps, BLOCK_K, WEIGHT_FIRST=True
        )
    to = out_ptr + lines[:, None] * N + columns[None, :]
    mask = (row < M)[:, None] & (columns < N)[None, :]
    tl.store(to, tl.trans(out).to(out_ptr.dtype.element_ty), mask=mask)


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


def run_experts(
    x: Tensor,
    experts: Tensor,
    packed: PackedExperts,
    widths: tuple[int, ...] = ONE_WIDTH,
    *,
    adapters: ExpertAdapters | None = None,
    fp8_rows: bool = False,
) -> Tensor:
    """Return the outputs f32[T * k, H] of the experts i64[T, k], packed together, for x [T, H].

    Lines of experts that are not packed are not written. `widths` are as in quantized_partials.
    """
    assert packed.addresses is not None
    assert x.is_contiguous()
    assert experts.is_contiguous()
    pairs, num_experts, inner = experts.numel(), len(packed.down), packed.down[0].in_features
    quantised = packed.gate_up[0].scales is not None and packed.down[0].scales is not None
    size = choose_size(pairs, num_experts, x.dtype, widths if quantised else ONE_WIDTH)
    tiles = cut_tiles(experts, packed.first, num_experts, size.pairs)
    gate_up, down = packed.addresses
    limit, made = packed.swiglu_limit, x.new_empty(pairs, x.shape[1], dtype=torch.float32)
    run = partial(_run, tiles=tiles, size=size, limit=limit, fp8_rows=fp8_rows)
    if adapters is None:
        gated = x.new_empty(pairs, inner)
        run(gated, x, packed.gate_up[0], gate_up, gated=True)
        run(made, gated, packed.down[0], down, gated=False)
        return made
    token = torch.arange(pairs, device=x.device) // experts.shape[1]
    places = adapters.of(token, experts.flatten() - packed.first, num_experts)
    both = x.new_empty(pairs, 2 * inner)
    run(both, x, packed.gate_up[0], gate_up, gated=False)
    add_adapters(both, x[token], places, adapters.gate_up)
    gated = silu_and_mul(both) if limit is None else clamped_swiglu(both, limit)
    run(made, gated, packed.down[0], down, gated=False)
    add_adapters(made, gated, places, adapters.down)
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
    limit: float | None,
    fp8_rows: bool,
) -> None:
    """Multiply each pair's line of x by its expert's weight; all are laid out as `like`."""
    assert x.shape[1] == like.in_features
    assert like.scales is not None or like.data.dtype is x.dtype
    assert like.bias is None or like.bias.dtype is x.dtype
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
        limit or 0.0,
        E=len(tiles.counts),
        PAIRS_PER_LINE=len(out) // len(x),
        GATED=gated,
        CLAMPED=limit is not None,
        HAS_BIAS=like.bias is not None,
        GROUP=like.group_size,
        FORMAT=int(like.format),
        BLOCK_M=size.pairs,
        BLOCK_N=size.columns,
        BLOCK_K=padded_group(like.group_size) if like.group_size else _BLOCK_K,
        num_warps=size.num_warps,
        num_stages=4,
    )


def are_alike(weights: Sequence[PackedLinear]) -> bool:
    """Return whether the weights are laid out in one way."""
    return len({(p.format, p.group_size, p.data.shape, p.bias is None) for p in weights}) == 1


def addresses_of(weights: Sequence[PackedLinear]) -> Tensor:
    """Return the addresses i64[3, E] of weights, scales and biases; 0 for what does not exist."""
    addresses = [_addresses(packed) for packed in weights]
    return torch.tensor(addresses, device=weights[0].data.device).T.contiguous()


def _addresses(packed: PackedLinear) -> tuple[int, ...]:
    parts = packed.data, packed.scales, packed.bias
    assert all(part is None or part.is_contiguous() for part in parts)
    assert all(part is None or part.data_ptr() % 16 == 0 for part in parts)
    return tuple(0 if part is None else part.data_ptr() for part in parts)


def pack_heads(weights: Sequence[PackedLinear]) -> PackedHeads:
    """Record the addresses of weights that are laid out in one way."""
    if not are_alike(weights) or weights[0].bias is not None:
        return PackedHeads(weights)
    return PackedHeads(weights, addresses_of(weights))


def multiply_heads(
    x: Tensor,
    heads: PackedHeads,
    widths: tuple[int, ...] = ONE_WIDTH,
    *,
    fp8_rows: bool = False,
) -> Tensor:
    """Return x [T, H, K] times the weight of each head: [T, H, N], in one launch.

    `widths` and `fp8_rows` are as in quantized_partials.
    """
    tokens, count, depth = x.shape
    like = heads.weights[0]
    assert heads.addresses is not None
    assert len(heads.weights) == count
    assert like.in_features == depth
    assert like.scales is not None or like.data.dtype is x.dtype
    out = x.new_empty(tokens, count, like.out_features)
    if tokens == 0:
        return out
    lines, fp8_rows = x.flatten(0, 1).contiguous(), fp8_rows and like.format is WeightFormat.FP8
    factor = quantize_rows(lines, like.group_size) if fp8_rows else Factor(lines, None)
    size = choose_size(tokens, 1, x.dtype, widths if like.scales is not None else ONE_WIDTH)
    grid = triton.cdiv(tokens, size.pairs), count, triton.cdiv(like.out_features, size.columns)
    _multiply_heads_kernel[grid](
        out,
        *factor,
        heads.addresses,
        tokens,
        like.out_features,
        like.in_features,
        H=count,
        GROUP=like.group_size,
        FORMAT=int(like.format),
        BLOCK_M=size.pairs,
        BLOCK_N=size.columns,
        BLOCK_K=padded_group(like.group_size) if like.group_size else _BLOCK_K,
        num_warps=size.num_warps,
        num_stages=4,
    )
    return out
