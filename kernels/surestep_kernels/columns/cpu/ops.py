"""The CPU kernels in C (folder cpu/), called through ctypes.

Each row of a result depends on that row's inputs alone, bit for bit: not on the number of rows,
the other rows or the number of threads. Matrix products and attention release the interpreter
lock; the short ops keep it, because handing it over costs more than they take.
"""

from __future__ import annotations

from collections.abc import Callable
from ctypes import CDLL, PyDLL, byref, c_float, c_int, c_long, c_void_p
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from surestep_common.errors import InvalidRequest
from torch import Tensor
from torch.nn import functional

from surestep_kernels.linear import FP16_HEADERS, PLAIN_FORMATS, PackedLinear, QuantizedWeight
from surestep_kernels.paged_attention import AttentionCase, AttentionRows
from surestep_kernels.rotary import Sections
from surestep_kernels.store_kv import LayerCache

from .binding import DTYPE_CODES, CachePages, bind

BLOCK_MULTIPLE = 8  # positions of a KV block, and dims of a head, that one vector covers
MAX_HEAD_DIM, MAX_GROUP = 256, 36  # as in columns/cpu/ops.h and paged_attention/attention.h

_P, _L, _I, _F = c_void_p, c_long, c_int, c_float
_SIGNATURES: dict[str, list[Any]] = {
    "rms_norm": [_P, _P, _P, _P, _F, _L, _L, _I],
    "silu_and_mul": [_P, _P, _L, _L, _I],
    "clamped_swiglu": [_P, _P, _F, _L, _L, _I],
    "rotary": [_P, _P, _P, _P, _L, _L, _L, _L, _L, _L, _L, _I],
    "store_kv": [_P, _P, _P, _P, _L, _L, _L, _L, _L, _L, _I],
}
_SIGNATURES_UNLOCKED: dict[str, list[Any]] = {
    "linear": [_P, _P, _P, _P, _L, _L, _L, _L, _I, _I, _I],
    "pack_linear": [_P, _P, _L, _L, _I],
    "pack_quantized": [*[_P] * 5, _L, _L, _L, _I],
    "packed_bytes": [_L, _L, _L, _I],
    "paged_attention": [*[_P] * 8, *[_L] * 8, _F, _I],
    "set_num_threads": [_I],
    "panel_width": [],
}
_RESULTS = {"panel_width": c_int, "packed_bytes": c_long}  # of the functions that return something


def refuse_unsupported(case: AttentionCase) -> None:
    """Raise InvalidRequest for attention that these kernels do not support."""
    if case.latent:  # none of it is used
        return
    if case.block_size % BLOCK_MULTIPLE:
        raise _unsupported(f"block_size {case.block_size}", "block_size")
    if case.head_dim % BLOCK_MULTIPLE or case.head_dim > MAX_HEAD_DIM or case.group > MAX_GROUP:
        raise _unsupported(f"{case.group} heads of {case.head_dim} elements to a key", "model")


def _unsupported(what: str, param: str) -> InvalidRequest:
    return InvalidRequest(f"{what} on a cpu needs attention_backend torch", param=param)


@dataclass(frozen=True, slots=True)
class CpuOps:
    """The ops of one compiled library; the C function of each op is a field."""

    c_rms_norm: Callable[..., None]
    c_silu_and_mul: Callable[..., None]
    c_clamped_swiglu: Callable[..., None]
    c_rotary: Callable[..., None]
    c_store_kv: Callable[..., None]
    c_linear: Callable[..., None]
    c_pack_linear: Callable[..., None]
    c_pack_quantized: Callable[..., None]
    c_packed_bytes: Callable[..., int]
    c_paged_attention: Callable[..., None]
    c_set_num_threads: Callable[[int], None]
    c_panel_width: Callable[[], int]

    @classmethod
    def load(cls, library: Path) -> CpuOps:
        """Open a library by its file name (see `file_of`). Raises OSError if that fails."""
        short, long = PyDLL(str(library)), CDLL(str(library))
        functions = {
            f"c_{op}": bind(short, op, args, _RESULTS.get(op)) for op, args in _SIGNATURES.items()
        }
        functions |= {
            f"c_{op}": bind(long, op, args, _RESULTS.get(op))
            for op, args in _SIGNATURES_UNLOCKED.items()
        }
        return cls(**functions)

    def set_num_threads(self, num_threads: int) -> None:
        """Set the number of threads that one op uses, the calling thread included.

        torch gets one: its few ops here are small, and its OpenMP threads spin between them, which
        costs far more than it gains as soon as another process needs the cores.
        """
        self.c_set_num_threads(num_threads)
        torch.set_num_threads(1)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Copy x first if it is a slice; otherwise as rms_norm_reference."""
        x, width = x.contiguous(), x.shape[-1]
        assert weight.dtype is torch.float32
        assert weight.numel() == width
        out, dtype = torch.empty_like(x), DTYPE_CODES[x.dtype]
        pointers = out.data_ptr(), x.data_ptr(), None, weight.data_ptr()
        self.c_rms_norm(*pointers, eps, x.numel() // width, width, dtype)
        return out

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        rows, width = shape = x.shape
        assert x.is_contiguous()
        assert residual.is_contiguous()
        assert x.dtype is residual.dtype
        assert weight.dtype is torch.float32
        assert residual.shape == shape
        assert weight.numel() == width
        out, dtype = torch.empty_like(x), DTYPE_CODES[x.dtype]
        pointers = out.data_ptr(), x.data_ptr(), residual.data_ptr(), weight.data_ptr()
        self.c_rms_norm(*pointers, eps, rows, width, dtype)
        return out

    def silu_and_mul(self, x: Tensor) -> Tensor:
        rows, width = x.shape
        assert x.is_contiguous()
        out, dtype = x.new_empty(rows, width // 2), DTYPE_CODES[x.dtype]
        self.c_silu_and_mul(out.data_ptr(), x.data_ptr(), rows, width // 2, dtype)
        return out

    def clamped_swiglu(self, x: Tensor, limit: float) -> Tensor:
        """Compute clamped_swiglu_reference."""
        rows, width = x.shape
        assert x.is_contiguous()
        assert limit > 0
        out, dtype = x.new_empty(rows, width // 2), DTYPE_CODES[x.dtype]
        self.c_clamped_swiglu(out.data_ptr(), x.data_ptr(), limit, rows, width // 2, dtype)
        return out

    def pack_linear(self, weight: Tensor, bias: Tensor | None = None) -> PackedLinear:
        """Pack weight [N, K] into panels of columns for streaming (layout: linear/cpu.c)."""
        rows, columns = weight.shape
        panel, format_ = self.c_panel_width(), PLAIN_FORMATS[weight.dtype]
        padded = -(-rows // panel) * panel
        data = weight.new_empty(padded * (columns + columns % 2))
        source = weight.contiguous()
        self.c_pack_linear(data.data_ptr(), source.data_ptr(), rows, columns, format_)
        return PackedLinear(data, self._pack_bias(bias, rows), columns, rows, format_)

    def pack_quantized(self, weight: QuantizedWeight, bias: Tensor | None = None) -> PackedLinear:
        """Pack codes and scales into panels in one stream (layout: linear/quantized.c)."""
        rows, columns = weight.codes.shape
        group_size, format_ = weight.group_size, weight.format
        scales, mins = weight.scales, weight.mins
        if mins is not None and format_ in FP16_HEADERS:
            scales, mins = scales.half(), mins.half()
        data = torch.empty(
            self.c_packed_bytes(rows, columns, group_size, format_), dtype=torch.uint8
        )
        parts = data, weight.codes, scales, weight.zeros, mins
        pointers = (None if part is None else part.data_ptr() for part in parts)
        self.c_pack_quantized(*pointers, rows, columns, group_size, format_)
        return PackedLinear(data, self._pack_bias(bias, rows), columns, rows, format_, group_size)

    def _pack_bias(self, bias: Tensor | None, rows: int) -> Tensor | None:
        padding = -rows % self.c_panel_width()
        return None if bias is None else functional.pad(bias.float(), (0, padding))

    def linear(
        self, x: Tensor, packed: PackedLinear, out_dtype: torch.dtype | None = None
    ) -> Tensor:
        """Sum in fp32 and round once, to out_dtype; otherwise as linear_reference."""
        rows, columns = x.shape
        data, width = packed.data, packed.out_features
        assert x.is_contiguous()
        assert x.dtype is data.dtype or packed.group_size
        assert columns == packed.in_features
        if out_dtype is None:
            out = x.new_empty(rows, width)
        else:
            out = x.new_empty(rows, width, dtype=out_dtype)
        bias = None if packed.bias is None else packed.bias.data_ptr()
        kinds = packed.group_size, packed.format, DTYPE_CODES[x.dtype], DTYPE_CODES[out.dtype]
        pointers = out.data_ptr(), x.data_ptr(), data.data_ptr(), bias
        self.c_linear(*pointers, rows, width, columns, *kinds)
        return out

    def rotary(
        self,
        q: Tensor,
        k: Tensor,
        positions: Tensor,
        cos_sin: Tensor,
        sections: Sections | None = None,
    ) -> None:
        """Rotate q and k, which may be slices of one projection. Sections are not supported."""
        assert sections is None
        rows, q_heads, head_dim = q.shape
        strides, kv_heads = (_token_stride(q), _token_stride(k)), k.shape[1]
        assert q.dtype is k.dtype
        assert positions.dtype is torch.int64
        assert cos_sin.dtype is torch.float32
        assert cos_sin.is_contiguous()
        pointers = q.data_ptr(), k.data_ptr(), positions.data_ptr(), cos_sin.data_ptr()
        sizes = rows, *strides, q_heads, kv_heads, head_dim, cos_sin.shape[1]
        self.c_rotary(*pointers, *sizes, DTYPE_CODES[q.dtype])

    def kv_cache_shape(
        self, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int
    ) -> tuple[int, int, int, int]:
        assert block_size % BLOCK_MULTIPLE == 0
        assert head_dim % BLOCK_MULTIPLE == 0
        return (num_blocks, num_kv_heads, block_size, head_dim)

    def store_kv(self, k: Tensor, v: Tensor, cache: LayerCache, kv_slots: Tensor) -> None:
        """Store k and v, which may be slices of one projection."""
        rows, heads, head_dim = k.shape
        strides, block_size = (_token_stride(k), _token_stride(v)), cache.k.shape[2]
        assert k.dtype is v.dtype
        assert kv_slots.dtype is torch.int64
        assert cache.head_dim == head_dim
        pages = CachePages.of(cache, k.dtype)
        inputs = k.data_ptr(), v.data_ptr(), kv_slots.data_ptr()
        sizes = rows, *strides, heads, head_dim, block_size
        self.c_store_kv(byref(pages), *inputs, *sizes, DTYPE_CODES[k.dtype])

    def paged_attention(
        self,
        q: Tensor,
        cache: LayerCache,
        rows: AttentionRows,
        scale: float,
        *,
        window: int = 0,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Attend as paged_attention_reference does; q may be a slice of a projection."""
        block_tables, slots, cu_rows, start, _ = rows
        tokens, heads, head_dim = q.shape
        _, kv_heads, block_size, _ = cache.k.shape
        assert cache.head_dim == head_dim
        assert block_tables.dtype is cu_rows.dtype is start.dtype is torch.int32
        assert slots.dtype is torch.int64
        assert block_tables.is_contiguous()
        assert slots.is_contiguous()
        assert len(slots) == len(start) == len(cu_rows) - 1
        assert window >= 0
        assert sinks is None or (sinks.shape == (heads,) and sinks.dtype is torch.float32)
        out = q.new_empty(tokens, heads, head_dim)
        pages = CachePages.of(cache, q.dtype)
        pointers = out.data_ptr(), q.data_ptr(), byref(pages)
        batch = block_tables.data_ptr(), slots.data_ptr(), cu_rows.data_ptr(), start.data_ptr()
        sinks_pointer = None if sinks is None else sinks.data_ptr()
        shape = kv_heads, heads // kv_heads, head_dim, block_size, window
        sizes = len(start), block_tables.shape[1], _token_stride(q), *shape
        dtype = DTYPE_CODES[q.dtype]
        self.c_paged_attention(*pointers, *batch, sinks_pointer, *sizes, scale, dtype)
        return out


def _token_stride(x: Tensor) -> int:
    """Return the elements from token to token of x [T, H, D], whose heads must be contiguous."""
    stride = x.stride()
    assert stride[2] == 1
    assert stride[1] == x.shape[2]
    return stride[0]
