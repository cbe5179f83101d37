"""Writing keys and values to the paged cache in Triton.

One program writes one token.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from surestep_kernels.columns.gpu.dependent_launch import DependentKernel, wait_for_earlier_kernels

from .reference import FP8, LayerCache


@triton.jit
def _encode_fp8(x):
    """Convert fp32 to E4M3 in u8, to nearest, halves to even, saturating; NaN stays NaN.

    In integers, because Triton's interpreter rounds its own conversion wrongly.
    """
    magnitude = tl.minimum(tl.abs(x), 448.0)
    bits = magnitude.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    # What is less than 2^-6 counts in 2^-9, the distance of numbers from 2^14 on.
    subnormal = (magnitude + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    code = tl.where(magnitude < 0.015625, subnormal, normal)
    sign = (x.to(tl.int32, bitcast=True) >> 24) & 0x80
    return (tl.where(x == x, code, 0x7F) | sign).to(tl.uint8)


@triton.jit
def encode(x, scales_ptr, which, IS_FP8: tl.constexpr, HAS_SCALES: tl.constexpr):
    if HAS_SCALES:
        x = tl.div_rn(x.to(tl.float32), tl.load(scales_ptr + which))
    if IS_FP8:
        x = _encode_fp8(x.to(tl.float32))
    return x


@DependentKernel
@triton.jit
def _store_kv_kernel(
    k_ptr,  # [T, H, D] with a stride from token to token
    v_ptr,  # [T, H, D]
    k_cache_ptr,  # [blocks, H, block_size, D] in any order of the inner dimensions
    v_cache_ptr,
    scales_ptr,  # f32[2]; HAS_SCALES only
    slots_ptr,  # i64[T]
    num_slots,
    k_stride,
    v_stride,
    block_stride,
    head_stride,
    offset_stride,
    H: tl.constexpr,
    D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    IS_FP8: tl.constexpr,
    HAS_SCALES: tl.constexpr,
):
    wait_for_earlier_kernels()
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token)
    if (slot < 0) | (slot >= num_slots):
        return
    heads, dims = tl.arange(0, BLOCK_H)[:, None], tl.arange(0, BLOCK_D)[None, :]
    mask = (heads < H) & (dims < D)
    at = heads * D + dims
    to = slot // BLOCK_SIZE * block_stride + slot % BLOCK_SIZE * offset_stride
    to += heads * head_stride + dims
    k = tl.load(k_ptr + token * k_stride + at, mask=mask, other=0.0)
    v = tl.load(v_ptr + token * v_stride + at, mask=mask, other=0.0)
    k = encode(k, scales_ptr, 0, IS_FP8, HAS_SCALES)
    v = encode(v, scales_ptr, 1, IS_FP8, HAS_SCALES)
    tl.store(k_cache_ptr + to, k.to(k_cache_ptr.dtype.element_ty), mask=mask)
    tl.store(v_cache_ptr + to, v.to(v_cache_ptr.dtype.element_ty), mask=mask)


def store_kv(k: Tensor, v: Tensor, cache: LayerCache, kv_slots: Tensor) -> None:
    """Store k and v, which may be slices of one projection; slots outside of the cache are skipped.

    The cache may be a view with another order of dimensions in memory, D innermost.
    """
    tokens, heads, head_dim = k.shape
    num_blocks, _, block_size, _ = cache.k.shape
    assert v.shape == k.shape
    assert cache.v.shape == cache.k.shape == (num_blocks, heads, block_size, head_dim)
    assert cache.v.stride() == cache.k.stride()
    assert k.stride()[1:] == v.stride()[1:] == (head_dim, 1)
    assert cache.k.stride(3) == kv_slots.stride(0) == 1
    assert cache.k.dtype is cache.v.dtype
    is_fp8 = cache.k.dtype is FP8
    assert is_fp8 or cache.scales is None
    if tokens == 0:
        return
    _store_kv_kernel[(tokens,)](
        k,
        v,
        *((cache.k.view(torch.uint8), cache.v.view(torch.uint8)) if is_fp8 else cache.pages),
        cache.scales,
        kv_slots,
        num_blocks * block_size,
        k.stride(0),
        v.stride(0),
        *cache.k.stride()[:3],
        H=heads,
        D=head_dim,
        BLOCK_SIZE=block_size,
        BLOCK_H=triton.next_power_of_2(heads),
        BLOCK_D=triton.next_power_of_2(head_dim),
        IS_FP8=is_fp8,
        HAS_SCALES=cache.scales is not None,
        enable_fp_fusion=False,
    )
