"""Routed experts in Triton.

A pair is a token and one of its experts. The pairs of each expert are listed and cut into tiles,
whose number is bounded by the shapes (tiles.py), and multiplied by the expert's weights
(products.py). Each pair has its own place in the output, from which a token's experts are
added in order at the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from surestep_kernels.add_adapters.triton import add_adapters
from surestep_kernels.clamped_swiglu.triton import clamped_swiglu
from surestep_kernels.columns.gpu.dependent_launch import DependentKernel, wait_for_earlier_kernels
from surestep_kernels.linear import PackedLinear
from surestep_kernels.linear.triton import ONE_WIDTH, linear
from surestep_kernels.linear.weight_tile import ROW_BLOCK
from surestep_kernels.silu_and_mul.triton import silu_and_mul

from .products import addresses_of, are_alike, run_experts
from .reference import ExpertAdapters, PackedExperts, moe_reference, pack_experts_reference

_BLOCK_H = 1024


@triton.jit
def add_experts(
    total,
    made_ptr,
    weights_ptr,
    experts_ptr,
    token,
    column,
    first,
    H,
    E: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
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
    first,
    H,
    E: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    wait_for_earlier_kernels()
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    total = tl.load(total_ptr + token * H + column, mask=column < H, other=0.0)
    total = add_experts(
        total, made_ptr, weights_ptr, experts_ptr, token, column, first, H, E, TOP_K, BLOCK_K
    )
    tl.store(total_ptr + token * H + column, total, mask=column < H)


def pack_experts(
    gate_up: Sequence[PackedLinear],
    down: Sequence[PackedLinear],
    first: int,
    swiglu_limit: float | None = None,
) -> PackedExperts:
    """Record the addresses of the weights. Experts with different layouts are run one at a time.

    So are quantised ones whose gates do not fill blocks of rows, which no published model has.
    """
    packed = pack_experts_reference(gate_up, down, first, swiglu_limit)
    whole = gate_up[0].scales is None or down[0].in_features % ROW_BLOCK == 0
    if not (whole and are_alike(gate_up) and are_alike(down)):
        return packed
    return replace(packed, addresses=torch.stack([addresses_of(gate_up), addresses_of(down)]))


def moe(
    total: Tensor,
    x: Tensor,
    weights: Tensor,
    experts: Tensor,
    packed: PackedExperts,
    widths: tuple[int, ...] = ONE_WIDTH,
    *,
    adapters: ExpertAdapters | None = None,
    fp8_rows: bool = False,
) -> None:
    """Compute moe_reference; `widths` and `fp8_rows` are as in quantized_partials."""
    if packed.addresses is None:
        moe_reference(
            total,
            x,
            weights,
            experts,
            packed,
            adapters=adapters,
            linear=partial(linear, widths=widths, fp8_rows=fp8_rows),
            silu_and_mul=silu_and_mul,
            clamped_swiglu=clamped_swiglu,
            add_adapters=add_adapters,
        )
        return
    (tokens, width), top_k = x.shape, experts.shape[1]
    assert all(tensor.is_contiguous() for tensor in (total, weights))
    assert total.dtype is weights.dtype is torch.float32
    assert total.shape == x.shape
    if tokens == 0:
        return
    made = run_experts(x, experts, packed, widths, fp8_rows=fp8_rows, adapters=adapters)
    _combine_kernel[tokens, triton.cdiv(width, _BLOCK_H)](
        total,
        made,
        weights,
        experts,
        packed.first,
        width,
        E=len(packed.down),
        TOP_K=top_k,
        BLOCK_K=triton.next_power_of_2(top_k),
        BLOCK_H=_BLOCK_H,
    )
