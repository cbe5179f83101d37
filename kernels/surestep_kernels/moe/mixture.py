"""Ops before and after routed experts, in one launch each, in Triton.

Before them, one program routes each token, and others activate parts of the shared expert. After
them, a program adds up a token's experts and the shared one, adds that to the residual and
normalises it. Both take products as PartialSums (splits.py). rms_norm.py says why sums are written
and read back.
"""

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from surestep_kernels.columns.gpu.dependent_launch import DependentKernel, wait_for_earlier_kernels
from surestep_kernels.linear.splits import PartialSums, load_total
from surestep_kernels.linear.triton import ONE_WIDTH
from surestep_kernels.mul_sigmoid.triton import gated
from surestep_kernels.rms_norm.triton import PER_WARP_OF_PARTIALS, add_and_normalise, tiles_of_rows
from surestep_kernels.route.triton import choose_experts
from surestep_kernels.silu_and_mul.triton import activate

from .products import run_experts
from .reference import Mixture, PackedExperts, Router
from .triton import add_experts

_BLOCK = 256  # columns of the shared expert: those of a warp


@DependentKernel
@triton.jit(do_not_specialize=["rows"])
def _route_tokens_kernel(
    weights_ptr,  # f32[T, K]
    experts_ptr,  # i64[T, K]
    gate_ptr,  # [T, 1]
    shared_ptr,  # [T, I]
    scores_ptr,  # f32[SCORE_SPLITS, T, W], of experts and, HAS_SHARED only, the gate
    bias_ptr,  # [W]; HAS_BIAS only
    sums_ptr,  # f32[SPLITS, T, 2 I], or x [1, T, 2 I]; HAS_SHARED only
    rows,  # T
    inner,  # I
    E: tl.constexpr,
    K: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NORMALIZE: tl.constexpr,
    SCORE_SPLITS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SPLITS: tl.constexpr,  # of the shared expert's; 0: there is none
    BLOCK: tl.constexpr,
):
    wait_for_earlier_kernels()
    token = tl.program_id(0).to(tl.int64)
    if SPLITS:  # noqa: SIM102 the one is for the compiler
        if tl.program_id(1) > 0:
            column = (tl.program_id(1) - 1) * BLOCK + tl.arange(0, BLOCK)
            activate(shared_ptr, sums_ptr, sums_ptr, token, column, rows, inner, SPLITS, False)
            return
    W: tl.constexpr = E + 1 if SPLITS else E
    at, expert = token * W, tl.arange(0, BLOCK_E)
    if SPLITS:
        last = E + tl.arange(0, 1)
        gate = load_total(
            scores_ptr, bias_ptr, at + last, last, last <= E, rows, W, SCORE_SPLITS, HAS_BIAS
        )
        tl.store(gate_ptr + token + last - E, gate.to(gate_ptr.dtype.element_ty))
    scores = load_total(
        scores_ptr, bias_ptr, at + expert, expert, expert < E, rows, W, SCORE_SPLITS, HAS_BIAS
    )
    scores = tl.where(expert < E, scores, float("-inf"))
    choose_experts(weights_ptr, experts_ptr, scores, token, E, K, BLOCK_K, NORMALIZE)


def route_tokens(
    scores: PartialSums, shared: PartialSums | None, x: Tensor, router: Router
) -> Mixture:
    """Fuse KernelSet.route_tokens with adding up the splits of its products."""
    tokens, outputs = scores.sums.shape[1:]
    experts, inner = outputs, 0
    new = partial(torch.empty, device=x.device)
    mixture = Mixture(
        x,
        weights=new(tokens, router.top_k),
        experts=new(tokens, router.top_k, dtype=torch.int64),
    )
    if shared is not None:
        assert shared.bias is None
        experts, inner = outputs - 1, shared.sums.shape[2] // 2
        gate, made = (new(tokens, width, dtype=x.dtype) for width in (1, inner))
        mixture = mixture._replace(gate=gate, shared=made)
    assert router.top_k <= experts
    assert router.gate is None
    assert scores.dtype is torch.float32
    if tokens:
        _route_tokens_kernel[tokens, 1 + triton.cdiv(inner, _BLOCK)](
            mixture.weights,
            mixture.experts,
            mixture.gate,
            mixture.shared,
            scores.sums,
            scores.bias,
            None if shared is None else shared.sums,
            tokens,
            inner,
            E=experts,
            K=router.top_k,
            BLOCK_E=triton.next_power_of_2(experts),
            BLOCK_K=triton.next_power_of_2(router.top_k),
            NORMALIZE=router.normalize,
            SCORE_SPLITS=len(scores.sums),
            HAS_BIAS=scores.bias is not None,
            SPLITS=0 if shared is None else len(shared.sums),
            BLOCK=_BLOCK,
            num_warps=1,
        )
    return mixture


@DependentKernel
@triton.jit(do_not_specialize=["rows", "first"])
def _mix_experts_kernel(
    out_ptr,  # [T, H]
    residual_ptr,  # [T, H]
    weight_ptr,  # f32[H]
    eps,
    shared_ptr,  # f32[SPLITS, T, H], or [1, T, H]; if there is a shared expert
    gate_ptr,  # [T, 1], a token every gate_stride elements; the same
    gate_stride,
    made_ptr,  # f32[T, TOP_K, H]
    weights_ptr,  # f32[T, TOP_K]
    experts_ptr,  # i64[T, TOP_K]
    rows,  # T
    width,  # H
    first,
    E: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLITS: tl.constexpr,  # 0: there is no shared expert
    BLOCK: tl.constexpr,
):
    wait_for_earlier_kernels()
    dtype: tl.constexpr = residual_ptr.dtype.element_ty
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    here = column[None, :]
    mask, at = here < width, row * width + here
    if SPLITS:
        shared = load_total(shared_ptr, shared_ptr, at, here, mask, rows, width, SPLITS, False)
        gate = tl.load(gate_ptr + row * gate_stride)
        total = gated(shared.to(dtype), gate, dtype).to(tl.float32)
    else:
        total = tl.zeros((1, BLOCK), tl.float32)
    total = add_experts(
        total, made_ptr, weights_ptr, experts_ptr, row, here, first, width, E, TOP_K, BLOCK_K
    )
    x = total.to(dtype)
    add_and_normalise(out_ptr, residual_ptr, weight_ptr, x, at, column, mask, eps, width)


def mix_experts_add_rms_norm(
    mixture: Mixture,
    packed: PackedExperts,
    shared: PartialSums | None,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    widths: tuple[int, ...] = ONE_WIDTH,
    *,
    fp8_rows: bool = False,
) -> Tensor:
    """Fuse the KernelSet's op with adding up the splits of the shared expert's last product."""
    (tokens, width), top_k = mixture.x.shape, mixture.experts.shape[1]
    splits, sums, gate, gate_stride = 0, None, mixture.gate, 0
    if shared is not None:
        assert gate is not None
        assert shared.bias is None
        assert residual.dtype is shared.dtype is gate.dtype
        splits, sums, gate_stride = len(shared.sums), shared.sums, gate.stride(0)
    assert residual.is_contiguous()
    assert residual.shape == (tokens, width)
    assert weight.dtype is mixture.weights.dtype is torch.float32
    assert weight.is_contiguous()
    assert mixture.weights.is_contiguous()
    out = torch.empty_like(residual)
    if tokens == 0:
        return out
    made = run_experts(mixture.x, mixture.experts, packed, widths, fp8_rows=fp8_rows)
    _, tiles = tiles_of_rows(tokens, width, PER_WARP_OF_PARTIALS)
    _mix_experts_kernel[(tokens,)](
        out,
        residual,
        weight,
        eps,
        sums,
        gate,
        gate_stride,
        made,
        mixture.weights,
        mixture.experts,
        tokens,
        width,
        packed.first,
        E=len(packed.down),
        TOP_K=top_k,
        BLOCK_K=triton.next_power_of_2(top_k),
        SPLITS=splits,
        BLOCK=tiles["BLOCK"],
        num_warps=tiles["num_warps"],
        enable_fp_fusion=False,
    )
    return out
