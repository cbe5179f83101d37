"""Norms of queries and keys, rotation and the KV store after one product, in Triton.

A program has some heads of a token. It adds up the partial sums of their projection (splits.py) and
writes them; then it reads them back, so that nothing that follows depends on the number of splits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from surestep_kernels.columns.gpu.dependent_launch import DependentKernel, wait_for_earlier_kernels
from surestep_kernels.linear.splits import PartialSums, load_total
from surestep_kernels.store_kv import FP8, LayerCache
from surestep_kernels.store_kv.triton import encode

from .reference import HeadProjection

_ELEMENTS = 512  # of a program: 16 bytes of each split for a thread


@triton.jit
def _scale(x, factor, weights, dtype: tl.constexpr):
    """Scale x, rounded before and after the weights (see rms_norm.py)."""
    return ((x * factor[:, None]).to(dtype).to(tl.float32) * weights).to(dtype).to(tl.float32)


@triton.jit
def _weights(q_norm_ptr, k_norm_ptr, is_query, is_key, dim):
    """Return the norm weights of each head, [H, D]; 1 where there is no norm."""
    of_q = tl.load(q_norm_ptr + dim + is_query * 0, mask=is_query, other=1.0)
    of_k = tl.load(k_norm_ptr + dim + is_key * 0, mask=is_key, other=1.0)
    return tl.where(is_key, of_k, of_q)


@triton.jit
def _normalise(
    x,
    partner,
    q_norm_ptr,
    k_norm_ptr,
    is_query,
    is_key,
    dim,
    partner_dim,
    eps,
    D: tl.constexpr,
    dtype: tl.constexpr,
):
    """Normalise queries and keys among the heads x [H, D], and the partner of each element."""
    factor = 1.0 / tl.sqrt_rn(tl.sum(x * x, axis=1) / D + eps)
    query, key, inside = is_query & (dim < D), is_key & (dim < D), partner_dim < D
    normed = _scale(x, factor, _weights(q_norm_ptr, k_norm_ptr, query, key, dim), dtype)
    query, key = is_query & inside, is_key & inside
    weights = _weights(q_norm_ptr, k_norm_ptr, query, key, partner_dim)
    return tl.where(is_query | is_key, normed, x), _scale(partner, factor, weights, dtype)


@triton.jit
def _rotated(x, partner, positions_ptr, cos_sin_ptr, token, num_positions, half, dim, pair):
    """Return x rotated as in rotary.py."""
    position = tl.load(positions_ptr + token)
    position = tl.minimum(tl.maximum(position, 0), num_positions - 1)
    angle = cos_sin_ptr + position * 2 * half + pair
    cos = tl.load(angle, mask=dim < 2 * half, other=1.0)
    sin = tl.load(angle + half, mask=dim < 2 * half, other=0.0)
    return x * cos + partner * tl.where(dim < half, -sin, sin)


@DependentKernel
@triton.jit(do_not_specialize=["T"])
def _project_heads_kernel(
    out_ptr,  # [T, heads, D]; keys and values are undefined, unless it is the sum itself
    sums_ptr,  # f32[SPLITS, T, heads * D]; or the same as out_ptr, if WHOLE
    bias_ptr,  # [heads * D]; HAS_BIAS only
    q_norm_ptr,  # f32[D]; HAS_NORM only
    k_norm_ptr,
    eps,
    positions_ptr,  # i64[T]
    cos_sin_ptr,  # f32[P, 2 half]
    k_cache_ptr,  # [blocks, KV_HEADS, BLOCK_SIZE, D] in any order of the inner dimensions
    v_cache_ptr,
    scales_ptr,  # f32[2]; HAS_SCALES only
    slots_ptr,  # i64[T]
    T,
    num_positions,
    half,
    num_slots,
    block_stride,
    head_stride,
    offset_stride,
    HEADS: tl.constexpr,
    OTHERS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SPLITS: tl.constexpr,
    WHOLE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    IS_FP8: tl.constexpr,
    HAS_SCALES: tl.constexpr,
):
    wait_for_earlier_kernels()
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    KEYS: tl.constexpr = HEADS + OTHERS
    VALUES: tl.constexpr = KEYS + KV_HEADS
    WIDTH: tl.constexpr = (VALUES + KV_HEADS) * D
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)[:, None]
    dim = tl.arange(0, BLOCK_D)[None, :]
    mask = (head < VALUES + KV_HEADS) & (dim < D)
    is_query, is_key, is_value = head < HEADS, (head >= KEYS) & (head < VALUES), head >= VALUES
    line = out_ptr + token * WIDTH + head * D
    if not WHOLE:
        column = head * D + dim
        at = token * WIDTH + column
        total = load_total(sums_ptr, bias_ptr, at, column, mask, T, WIDTH, SPLITS, HAS_BIAS)
        tl.store(line + dim, total.to(dtype), mask=mask)
        tl.debug_barrier()  # a thread reads what other threads wrote
    x = tl.load(line + dim, mask=mask, other=0.0).to(tl.float32)
    turns = (dim < 2 * half) & (is_query | is_key)
    pair = tl.where(dim < half, dim, dim - half)
    partner_dim = tl.where(dim < half, dim + half, pair)
    partner = tl.load(line + partner_dim, mask=mask & turns, other=0.0).to(tl.float32)
    if HAS_NORM:
        x, partner = _normalise(
            x, partner, q_norm_ptr, k_norm_ptr, is_query, is_key, dim, partner_dim, eps, D, dtype
        )
    turned = _rotated(x, partner, positions_ptr, cos_sin_ptr, token, num_positions, half, dim, pair)
    x = tl.where(turns, turned.to(dtype).to(tl.float32), x).to(dtype)
    tl.debug_barrier()  # a thread may overwrite what another reads
    tl.store(line + dim, x, mask=mask & is_query)
    slot = tl.load(slots_ptr + token)
    heads_stored = tl.where((slot >= 0) & (slot < num_slots), VALUES + KV_HEADS, 0)
    coded = encode(x, scales_ptr, is_value.to(tl.int32), IS_FP8, HAS_SCALES)
    coded, stored = coded.to(k_cache_ptr.dtype.element_ty), (head < heads_stored) & (dim < D)
    to = slot // BLOCK_SIZE * block_stride + slot % BLOCK_SIZE * offset_stride + dim
    k_to = k_cache_ptr + to + (head - KEYS).to(tl.int64) * head_stride
    v_to = v_cache_ptr + to + (head - VALUES).to(tl.int64) * head_stride
    tl.store(k_to, coded, mask=stored & is_key)
    tl.store(v_to, coded, mask=stored & is_value)


def project_heads_of_partials(
    x: PartialSums,
    projection: HeadProjection,
    positions: Tensor,
    cache: LayerCache,
    kv_slots: Tensor,
) -> tuple[Tensor, Tensor]:
    """Fuse KernelSet.project_heads with adding up the splits of x. Slots outside the cache are
    skipped."""
    splits, tokens, _ = x.sums.shape
    heads, others, kv_heads, _ = projection.sizes
    head_dim, norms = projection.head_dim, (projection.q_norm, projection.k_norm)
    (num_positions, turned), all_heads = projection.cos_sin.shape, sum(projection.sizes)
    num_blocks, _, block_size, _ = cache.k.shape
    assert x.sums.shape[2] == all_heads * head_dim
    assert x.sums.is_contiguous()
    _check(projection, positions, cache, kv_slots)
    is_fp8, whole = cache.k.dtype is FP8, x.is_final
    out = x.sums[0] if whole else x.sums.new_empty(tokens, all_heads * head_dim, dtype=x.dtype)
    made = out.view(tokens, all_heads, head_dim)
    result = made[:, :heads], made[:, heads : heads + others]
    if tokens == 0:
        return result
    block_d = triton.next_power_of_2(head_dim)
    block_h = max(1, _ELEMENTS // block_d)
    _project_heads_kernel[tokens, triton.cdiv(all_heads, block_h)](
        out,
        out if whole else x.sums,
        x.bias,
        *norms,
        projection.eps,
        positions,
        projection.cos_sin,
        *((cache.k.view(torch.uint8), cache.v.view(torch.uint8)) if is_fp8 else cache.pages),
        cache.scales,
        kv_slots,
        tokens,
        num_positions,
        turned // 2,
        num_blocks * block_size,
        *cache.k.stride()[:3],
        HEADS=heads,
        OTHERS=others,
        KV_HEADS=kv_heads,
        D=head_dim,
        BLOCK_SIZE=block_size,
        BLOCK_H=block_h,
        BLOCK_D=block_d,
        SPLITS=splits,
        WHOLE=whole,
        HAS_BIAS=x.bias is not None,
        HAS_NORM=norms[0] is not None,
        IS_FP8=is_fp8,
        HAS_SCALES=cache.scales is not None,
        enable_fp_fusion=False,
    )
    return result


def _check(
    projection: HeadProjection, positions: Tensor, cache: LayerCache, kv_slots: Tensor
) -> None:
    head_dim, norms = projection.head_dim, (projection.q_norm, projection.k_norm)
    num_blocks, _, block_size, _ = cache.k.shape
    turned = projection.cos_sin.shape[1]
    assert turned % 2 == 0
    assert turned <= head_dim
    assert (norms[0] is None) == (norms[1] is None)
    assert all(n is None or (n.dtype is torch.float32 and n.is_contiguous()) for n in norms)
    assert projection.cos_sin.dtype is torch.float32
    assert projection.cos_sin.is_contiguous()
    assert positions.dtype is kv_slots.dtype is torch.int64
    assert positions.is_contiguous()
    assert cache.v.shape == cache.k.shape == (num_blocks, projection.sizes[2], block_size, head_dim)
    assert cache.v.stride() == cache.k.stride()
    assert cache.k.stride(3) == kv_slots.stride(0) == 1
    assert cache.k.dtype is cache.v.dtype
    assert cache.k.dtype is FP8 or cache.scales is None
