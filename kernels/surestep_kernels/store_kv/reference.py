"""The paged KV cache: its shape, and writing to it."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
INT8 = torch.int8
_INT8_MAX = 127
_SCALE_BYTES = 4


class LayerCache(NamedTuple):
    """Pages of one layer, each tensor in the KernelSet's kv_cache_shape `with_scales`."""

    k: Tensor
    v: Tensor
    scales: Tensor | None = None  # f32[2] FP8 pages hold k / scales[0], v / scales[1]; None: 1, 1

    @property
    def pages(self) -> tuple[Tensor, Tensor]:
        """Return the pages of keys and of values."""
        return self.k, self.v

    @property
    def head_dim(self) -> int:
        """Return the elements of a head, without the scale behind them."""
        return self.k.shape[3] - (_SCALE_BYTES if self.k.dtype is INT8 else 0)


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


def with_scales(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[int, ...]:
    """Return a kv_cache_shape as pages of this dtype have it: those of INT8 hold an f32 scale for
    every position and head besides."""
    return (*shape[:-1], shape[-1] + _SCALE_BYTES) if dtype is INT8 else shape


def store_kv_reference(k: Tensor, v: Tensor, cache: LayerCache, kv_slots: Tensor) -> None:
    """Write k and v [T, Hkv, D] to the flat slots i64[T] = block * block_size + offset.

    FP8 pages saturate at +-448; NaN stays NaN. In INT8 pages a position of a head has a scale, its
    largest magnitude / 127, and is NaN as a whole if an element of it is not finite.
    """
    block_size = cache.k.shape[2]
    block = torch.div(kv_slots, block_size, rounding_mode="floor")
    offset = kv_slots % block_size
    cache.k[block, :, offset] = _encode(k, cache, 0)
    cache.v[block, :, offset] = _encode(v, cache, 1)


def _encode(x: Tensor, cache: LayerCache, which: int) -> Tensor:
    if cache.k.dtype is INT8:
        return _encode_int8(x.float())
    if cache.k.dtype is not FP8:
        return x.to(cache.k.dtype)
    x = x.float() if cache.scales is None else x.float() / cache.scales[which]
    return x.clamp(-FP8_MAX, FP8_MAX).to(FP8)


def _encode_int8(x: Tensor) -> Tensor:
    """Return the codes of f32[..., D] and behind them the bytes of their scale, i8[..., D + 4]."""
    most = x.abs().amax(-1, keepdim=True)
    finite = most.isfinite()
    scale = (most / _INT8_MAX).where(finite, torch.nan)
    codes = x.where(finite, 0.0) / scale.where(scale > 0, 1.0)
    codes = codes.round().clamp(-_INT8_MAX, _INT8_MAX).to(INT8)  # a subnormal scale is coarse
    return torch.cat((codes, scale.view(INT8)), dim=-1)


def decode_int8(pages: Tensor) -> Tensor:
    """Return f32[..., D] of INT8 pages [..., D + 4] of the reference."""
    codes, scale = pages[..., :-_SCALE_BYTES], pages[..., -_SCALE_BYTES:]
    return codes.float() * scale.contiguous().view(torch.float32)
