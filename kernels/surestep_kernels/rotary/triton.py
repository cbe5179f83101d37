"""Rotary position embedding in Triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from surestep_kernels.columns.gpu.dependent_launch import DependentKernel, wait_for_earlier_kernels

from .reference import Sections


@triton.jit
def _axes(pair, height, width):
    """Return the axis of each pair, as section_axes."""
    axis = pair % 3
    section = tl.where(axis == 1, height, width)
    return tl.where((axis > 0) & (pair // 3 < section), axis, 0)


@triton.jit
def _rotate(x_ptr, cos, sin, pair, half, heads, head_stride, HEADS: tl.constexpr):
    """Rotate the pairs (i, half + i) of all heads of a token in place."""
    head = tl.arange(0, HEADS)
    mask = (head < heads)[:, None] & (pair < half)[None, :]
    first_at = x_ptr + head[:, None].to(tl.int64) * head_stride + pair[None, :]
    first = tl.load(first_at, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(first_at + half, mask=mask, other=0.0).to(tl.float32)
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    tl.store(first_at, (first * cos - second * sin).to(dtype), mask=mask)
    tl.store(first_at + half, (second * cos + first * sin).to(dtype), mask=mask)


@DependentKernel
@triton.jit(do_not_specialize=["tokens"])
def _rotary_kernel(
    q_ptr,  # [T, Hq, D], strides q_token, q_head, 1
    k_ptr,  # [T, Hkv, D], strides k_token, k_head, 1
    positions_ptr,  # i64[T], or [3, T] with SECTIONS
    cos_sin_ptr,  # f32[P, D']
    tokens,  # T
    num_positions,  # P
    half,  # D' / 2
    q_heads,
    kv_heads,
    q_token,
    q_head,
    k_token,
    k_head,
    height,  # frequencies that turn with it; SECTIONS only
    width,
    SECTIONS: tl.constexpr,
    HALF: tl.constexpr,
    Q_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
):
    wait_for_earlier_kernels()
    token = tl.program_id(0).to(tl.int64)
    pair = tl.arange(0, HALF)
    if SECTIONS:
        at = positions_ptr + _axes(pair, height, width).to(tl.int64) * tokens + token
        position = tl.load(at, mask=pair < half, other=0)
    else:
        position = tl.load(positions_ptr + token)
    position = tl.minimum(tl.maximum(position, 0), num_positions - 1)
    angle = cos_sin_ptr + position * 2 * half + pair
    cos = tl.load(angle, mask=pair < half, other=1.0)[None, :]
    sin = tl.load(angle + half, mask=pair < half, other=0.0)[None, :]
    _rotate(q_ptr + token * q_token, cos, sin, pair, half, q_heads, q_head, Q_HEADS)
    _rotate(k_ptr + token * k_token, cos, sin, pair, half, kv_heads, k_head, KV_HEADS)


def rotary(
    q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor, sections: Sections | None = None
) -> None:
    """Rotate q and k, which may be slices of one projection, as rotary_reference does."""
    tokens, q_heads, head_dim = q.shape
    num_positions, turned = cos_sin.shape
    assert q.dtype is k.dtype
    assert q.stride(2) == k.stride(2) == 1
    assert k.shape[::2] == (tokens, head_dim)
    assert turned % 2 == 0
    assert turned <= head_dim
    assert positions.dtype is torch.int64
    assert positions.is_contiguous()
    assert positions.shape == ((tokens,) if sections is None else (3, tokens))
    assert sections is None or sum(sections) == turned // 2
    assert cos_sin.dtype is torch.float32
    assert cos_sin.is_contiguous()
    _, height, width = sections or (0, 0, 0)
    kv_heads, strides = k.shape[1], (*q.stride()[:2], *k.stride()[:2])
    sizes = tokens, num_positions, turned // 2, q_heads, kv_heads
    if tokens == 0:
        return
    _rotary_kernel[(tokens,)](
        q,
        k,
        positions,
        cos_sin,
        *sizes,
        *strides,
        height,
        width,
        SECTIONS=sections is not None,
        HALF=triton.next_power_of_2(turned // 2),
        Q_HEADS=triton.next_power_of_2(q_heads),
        KV_HEADS=triton.next_power_of_2(kv_heads),
    )
