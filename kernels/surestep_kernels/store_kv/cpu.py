"""The pages of a KV cache, and how they are written, in C."""

from __future__ import annotations

from ctypes import Structure, byref, c_float, c_int, c_void_p
from functools import partial

import torch
from torch import Tensor

from surestep_kernels.columns.cpu.binding import DTYPE_CODES, CFunction, Library, token_stride

from .reference import FP8, INT8, LayerCache

WIDTH = 8  # positions of a KV block, and dims of a head, that one vector covers
CACHE_CODES = {**DTYPE_CODES, FP8: 2, INT8: 3}


class CachePages(Structure):
    """Struct cache_pages of columns/cpu/ops.h."""

    _fields_ = (
        ("k", c_void_p),
        ("v", c_void_p),
        ("k_scale", c_float),
        ("v_scale", c_float),
        ("dtype", c_int),
    )

    @classmethod
    def of(cls, cache: LayerCache, dtype: torch.dtype) -> CachePages:
        """Return the pages of a cache for keys, values and queries of this dtype."""
        assert cache.k.is_contiguous()
        assert cache.v.is_contiguous()
        assert cache.k.dtype is cache.v.dtype
        assert cache.k.dtype in (dtype, FP8, INT8)
        scales = (1.0, 1.0) if cache.scales is None else cache.scales.tolist()
        return cls(cache.k.data_ptr(), cache.v.data_ptr(), *scales, CACHE_CODES[cache.k.dtype])


def load(library: Library) -> dict[str, CFunction]:
    """Return the ops of this folder."""
    run = library.short("store_kv", "4P 6l i")
    return {"kv_cache_shape": kv_cache_shape, "store_kv": partial(store_kv, run)}


def kv_cache_shape(
    num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int
) -> tuple[int, int, int, int]:
    assert block_size % WIDTH == 0
    assert head_dim % WIDTH == 0
    return (num_blocks, num_kv_heads, block_size, head_dim)


def store_kv(run: CFunction, k: Tensor, v: Tensor, cache: LayerCache, kv_slots: Tensor) -> None:
    """Store k and v, which may be slices of one projection."""
    rows, heads, head_dim = k.shape
    strides, block_size = (token_stride(k), token_stride(v)), cache.k.shape[2]
    assert k.dtype is v.dtype
    assert kv_slots.dtype is torch.int64
    assert cache.head_dim == head_dim
    pages = CachePages.of(cache, k.dtype)
    inputs = k.data_ptr(), v.data_ptr(), kv_slots.data_ptr()
    sizes = rows, *strides, heads, head_dim, block_size
    run(byref(pages), *inputs, *sizes, DTYPE_CODES[k.dtype])
