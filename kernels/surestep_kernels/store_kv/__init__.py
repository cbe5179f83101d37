"""Write keys and values to the pages of a KV cache, which says here how it stores them."""

from __future__ import annotations

from .reference import (
    FP8,
    FP8_MAX,
    INT8,
    LayerCache,
    StoreKV,
    decode_int8,
    kv_cache_shape,
    store_kv_reference,
    with_scales,
)

__all__ = [
    "FP8",
    "FP8_MAX",
    "INT8",
    "LayerCache",
    "StoreKV",
    "decode_int8",
    "kv_cache_shape",
    "store_kv_reference",
    "with_scales",
]
