"""Routing of tokens to experts in Triton. A program has one token, and picks maxima in turn."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from surestep_kernels.columns.gpu.dependent_launch import DependentKernel, wait_for_earlier_kernels

from .reference import SigmoidChoice

_LEAST = tl.constexpr(-3.4e38)  # what is lower is as good as this


@triton.jit
def choose_experts(
    weights_ptr,
    experts_ptr,
    logits,
    token,
    E: tl.constexpr,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NORMALIZE: tl.constexpr,
):
    """Store the experts and weights of a token with these logits, which are -inf from E on."""
    expert, choice = tl.arange(0, logits.shape[0]), tl.arange(0, BLOCK_K)
    peak = tl.max(logits, axis=0)
    total = tl.sum(tl.exp(logits - peak), axis=0)
    left = tl.where(logits > _LEAST, logits, _LEAST)  # no NaN to compare with
    left = tl.where(expert < E, left, float("-inf"))
    weights, experts = tl.zeros((BLOCK_K,), tl.float32), tl.zeros((BLOCK_K,), tl.int64)
    for i in range(K):
        greatest = tl.max(left, axis=0)
        best = tl.min(tl.where(left == greatest, expert, logits.shape[0]), axis=0)
        weights = tl.where(choice == i, greatest, weights)
        experts = tl.where(choice == i, best.to(tl.int64), experts)
        left = tl.where(expert == best, float("-inf"), left)
    weights = tl.where(choice < K, tl.exp(weights - peak) / total, 0.0)
    weights = tl.where(total == total, weights, float("nan"))  # NaN is not hidden
    if NORMALIZE:
        weights = weights / tl.sum(weights, axis=0)
    tl.store(weights_ptr + token * K + choice, weights, mask=choice < K)
    tl.store(experts_ptr + token * K + choice, experts, mask=choice < K)


@DependentKernel
@triton.jit
def _route_kernel(
    weights_ptr,  # f32[T, K]
    experts_ptr,  # i64[T, K]
    logits_ptr,  # f32[T, E]
    E: tl.constexpr,
    K: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NORMALIZE: tl.constexpr,
):
    wait_for_earlier_kernels()
    token, expert = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK_E)
    logits = tl.load(logits_ptr + token * E + expert, mask=expert < E, other=float("-inf"))
    choose_experts(weights_ptr, experts_ptr, logits, token, E, K, BLOCK_K, NORMALIZE)


def route(logits: Tensor, top_k: int, *, normalize: bool) -> tuple[Tensor, Tensor]:
    """Route as route_reference. A token's experts are distinct and exist, whatever its logits."""
    tokens, num_experts = logits.shape
    assert top_k <= num_experts
    assert logits.is_contiguous()
    assert logits.dtype is torch.float32
    weights = logits.new_empty(tokens, top_k)
    experts = torch.empty(tokens, top_k, dtype=torch.int64, device=logits.device)
    if tokens:
        _route_kernel[(tokens,)](
            weights,
            experts,
            logits,
            E=num_experts,
            K=top_k,
            BLOCK_E=triton.next_power_of_2(num_experts),
            BLOCK_K=triton.next_power_of_2(top_k),
            NORMALIZE=normalize,
            num_warps=1,
        )
    return weights, experts


@DependentKernel
@triton.jit
def _route_sigmoid_kernel(
    weights_ptr,  # f32[T, K]
    experts_ptr,  # i64[T, K]
    logits_ptr,  # f32[T, GROUPS * SIZE]
    bias_ptr,  # f32[GROUPS * SIZE]
    scale,  # of the weights
    GROUPS: tl.constexpr,
    SIZE: tl.constexpr,  # experts of a group
    KEPT: tl.constexpr,
    K: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NORMALIZE: tl.constexpr,
):
    wait_for_earlier_kernels()
    token, choice = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK_K)
    group, member = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_S)
    exists = (group < GROUPS)[:, None] & (member < SIZE)[None, :]
    expert = group[:, None] * SIZE + member[None, :]
    logits = tl.load(logits_ptr + token * (GROUPS * SIZE) + expert, mask=exists, other=0.0)
    expert = tl.where(exists, expert, GROUPS * SIZE)  # padding has no number of its own
    scores = 1.0 / (1.0 + tl.exp(-logits))
    left = scores + tl.load(bias_ptr + expert, mask=exists, other=0.0)
    left = tl.where(left > _LEAST, left, _LEAST)  # no NaN to compare with
    left = tl.where(exists, left, float("-inf"))
    if GROUPS > 1:
        first = tl.max(left, axis=1)
        place = tl.min(tl.where(left == first[:, None], member[None, :], BLOCK_S), axis=1)
        others = tl.where(member[None, :] == place[:, None], float("-inf"), left)
        sums = tl.where(group < GROUPS, first + tl.max(others, axis=1), float("-inf"))
        kept = group < 0
        for _ in range(KEPT):
            best = tl.min(tl.where(sums == tl.max(sums, axis=0), group, BLOCK_G), axis=0)
            kept = kept | (group == best)
            sums = tl.where(group == best, float("-inf"), sums)
        left = tl.where(kept[:, None], left, float("-inf"))
    weights, experts = tl.zeros((BLOCK_K,), tl.float32), tl.zeros((BLOCK_K,), tl.int64)
    for i in range(K):
        greatest = tl.max(tl.max(left, axis=1), axis=0)
        found = tl.where(left == greatest, expert, GROUPS * SIZE)
        best = tl.min(tl.min(found, axis=1), axis=0)
        weight = tl.sum(tl.sum(tl.where(expert == best, scores, 0.0), axis=1), axis=0)
        weights = tl.where(choice == i, weight, weights)
        experts = tl.where(choice == i, best.to(tl.int64), experts)
        left = tl.where(expert == best, float("-inf"), left)
    if NORMALIZE:
        weights = weights / (tl.sum(weights, axis=0) + 1e-20)
    broken = (exists & (scores != scores)).to(tl.int32)
    is_broken = tl.max(tl.max(broken, axis=1), axis=0) > 0
    weights = tl.where(is_broken, float("nan"), weights * scale)
    tl.store(weights_ptr + token * K + choice, weights, mask=choice < K)
    tl.store(experts_ptr + token * K + choice, experts, mask=choice < K)


def route_sigmoid(logits: Tensor, how: SigmoidChoice) -> tuple[Tensor, Tensor]:
    """Route as route_sigmoid_reference. A token's experts are distinct and exist."""
    tokens, num_experts = logits.shape
    assert num_experts % how.groups == 0
    assert logits.is_contiguous()
    assert logits.dtype is how.bias.dtype is torch.float32
    weights = logits.new_empty(tokens, how.top_k)
    experts = torch.empty(tokens, how.top_k, dtype=torch.int64, device=logits.device)
    size = num_experts // how.groups
    if tokens:
        _route_sigmoid_kernel[(tokens,)](
            weights,
            experts,
            logits,
            how.bias,
            how.scale,
            GROUPS=how.groups,
            SIZE=size,
            KEPT=how.kept_groups,
            K=how.top_k,
            BLOCK_G=triton.next_power_of_2(how.groups),
            BLOCK_S=triton.next_power_of_2(size),
            BLOCK_K=triton.next_power_of_2(how.top_k),
            NORMALIZE=how.normalize,
            num_warps=1,
        )
    return weights, experts
