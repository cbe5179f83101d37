"""The paged KV cache: its shape, and writing to it."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0


class LayerCache(NamedTuple):
    """Pages of one layer, each tensor in the KernelSet's kv_cache_shape."""

    k: Tensor
    v: Tensor
    scales: Tensor | None = None  # f32[2] FP8 pages hold k / scales[0], v / scales[1]; None: 1, 1

    @property
    def pages(self) -> tuple[Tensor, Tensor]:
        """Return the pages of keys and of values."""
        return self.k, self.v


class StoreKV(Protocol):
    def __call__(self, k: Tensor, v: Tensor, cache: LayerCache, kv_slots: Tensor) -> None: ...


def kv_cache_shape(
    num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int
) -> tuple[int, int, int, int]:
    """Return the shape of one layer's key cache, and of its value cache.

    A block is contiguous and may be copied or cleared as a whole. The order of the elements inside
    a block is private to the KernelSet that wrote it.
    """
    return (num_blocks, num_kv_heads, block_size, head_dim)


def store_kv_reference(k: Tensor, v: Tensor, cache: LayerCache, kv_slots: Tensor) -> None:
    """Write k and v [T, Hkv, D] to the flat slots i64[T] = block * block_size + offset.

    FP8 pages saturate at +-448; NaN stays NaN.
    """
    block_size = cache.k.shape[2]
    block = torch.div(kv_slots, block_size, rounding_mode="floor")
    offset = kv_slots % block_size
    cache.k[block, :, offset] = _encode(k, cache, 0)
    cache.v[block, :, offset] = _encode(v, cache, 1)


def _encode(x: Tensor, cache: LayerCache, which: int) -> Tensor:
    if cache.k.dtype is not FP8:
        return x.to(cache.k.dtype)
    x = x.float() if cache.scales is None else x.float() / cache.scales[which]
    return x.clamp(-FP8_MAX, FP8_MAX).to(FP8)
