"""The paged KV cache: its shape, and writing into it."""

from __future__ import annotations

import torch
from torch import Tensor


def kv_cache_shape(
    num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int
) -> tuple[int, int, int, int]:
    """Shape of one layer's key cache, and of its value cache.

    A block is contiguous and may be copied or cleared as a whole. The order of the elements
    inside a block is private to the KernelSet that wrote it.
    """
    return (num_blocks, num_kv_heads, block_size, head_dim)


def store_kv_reference(
    k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, kv_slots: Tensor
) -> None:
    """Write k and v [T, Hkv, D] to the flat slots i64[T] = block * block_size + offset."""
    block_size = k_cache.shape[2]
    block = torch.div(kv_slots, block_size, rounding_mode="floor")
    offset = kv_slots % block_size
    k_cache[block, :, offset] = k
    v_cache[block, :, offset] = v
