"""A dense layer in one C call, and the KernelSet that has it."""

from __future__ import annotations

from collections.abc import Callable
from ctypes import CDLL, Structure, byref, c_float, c_int, c_long, c_void_p
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from surestep_kernels.kernel_set import KernelSet
from surestep_kernels.mixers.dense_layer import DenseLayer, LayerTokens, RunDenseLayer
from surestep_kernels.mixers.kv_cache import LayerCache
from surestep_kernels.ops.linear import PackedLinear, WeightFormat

from .binding import DTYPE_CODES, CachePages, bind
from .ops import CpuOps

# The ops that the call is made of.
_PARTS = (
    *("rms_norm", "add_rms_norm", "linear", "silu_and_mul"),
    *("rotary", "store_kv", "paged_attention"),
)


class _Weight(Structure):
    _fields_ = (
        ("data", c_void_p),
        ("bias", c_void_p),
        ("n", c_long),
        ("k", c_long),
        ("group", c_long),
        ("format", c_int),
    )


class _Layer(Structure):
    """As dense_layer in cpu/layer.c."""

    _fields_ = (
        *((name, _Weight) for name in ("qkv", "out", "gate_up", "down")),
        *((name, c_void_p) for name in ("q_norm", "k_norm", "post_norm", "cos_sin", "sinks")),
        *((n, c_long) for n in ("q_heads", "kv_heads", "head_dim", "rotary_dim", "window")),
        *((name, c_float) for name in ("head_eps", "eps", "scale")),
        ("dtype", c_int),
    )


class _Tokens(Structure):
    """As layer_tokens in cpu/layer.c."""

    _fields_ = (
        *((name, c_void_p) for name in ("positions", "kv_slots", "block_tables", "slots")),
        *((name, c_void_p) for name in ("cu_rows", "start")),
        *((name, c_long) for name in ("tokens", "rows", "table_width", "block_size")),
    )


@dataclass(frozen=True, slots=True)
class CpuKernels(KernelSet):
    """The C kernels; a dense layer of unmixed ops is one call."""

    c_dense_layer: Callable[..., None] | None = None
    ops: CpuOps | None = None  # of the same library

    def dense_layer(self, layer: DenseLayer) -> RunDenseLayer:
        """Return one call, unless an op has been exchanged for another one."""
        ops, run = self.ops, self.c_dense_layer
        assert ops is not None
        assert run is not None
        if any(getattr(self, name) != getattr(ops, name) for name in _PARTS):
            return KernelSet.dense_layer(self, layer)
        return _OneCall(layer, run)


def load_layer(library: Path) -> Callable[..., None]:
    """Return the C function of a library. Raises OSError."""
    return bind(CDLL(str(library)), "dense_layer", [c_void_p] * 7)


class _OneCall:
    """A layer whose addresses are looked up once; implements RunDenseLayer."""

    def __init__(self, layer: DenseLayer, run: Callable[..., None]) -> None:
        self._layer, self._run = layer, run  # keeps what the addresses point to
        self._structures = dict[torch.dtype, Any]()
        self._pages: tuple[object, Any] = (None, None)  # of the newest cache, by where it is

    def __call__(
        self, x: Tensor, residual: Tensor, next_norm: Tensor, tokens: LayerTokens, cache: LayerCache
    ) -> Tensor:
        dtype = x.dtype
        assert x.is_contiguous()
        assert residual.is_contiguous()
        assert x.shape == (residual.shape[0], self._layer.projection.packed.in_features)
        assert residual.shape[1:] == next_norm.shape == (self._layer.down.out_features,)
        assert next_norm.dtype is torch.float32
        assert dtype is residual.dtype
        where = cache.k.data_ptr(), cache.v.data_ptr(), cache.k.dtype
        known, pages = self._pages
        if known != where or cache.scales is not None:
            pages = byref(CachePages.of(cache, dtype))
            self._pages = where, pages
        if dtype not in self._structures:
            self._structures[dtype] = byref(_structure(self._layer, dtype))
        if tokens.prepared is None:
            tokens.prepared = byref(_tokens(tokens, cache.k.shape[2]))
        out = torch.empty_like(residual)
        streams = out.data_ptr(), x.data_ptr(), residual.data_ptr(), next_norm.data_ptr()
        self._run(*streams, self._structures[dtype], tokens.prepared, pages)
        return out


def _tokens(tokens: LayerTokens, block_size: int) -> _Tokens:
    positions, kv_slots = tokens.positions, tokens.kv_slots
    block_tables, slots, cu_rows, start, _ = tokens.rows
    assert block_tables.dtype is cu_rows.dtype is start.dtype is torch.int32
    assert slots.dtype is positions.dtype is kv_slots.dtype is torch.int64
    assert block_tables.is_contiguous()
    (count,) = start.shape  # Tensor.__len__ takes microseconds
    assert slots.shape == (count,)
    assert cu_rows.shape == (count + 1,)
    parts = positions, kv_slots, block_tables, slots, cu_rows, start
    sizes = positions.shape[0], count, block_tables.shape[1], block_size
    return _Tokens(*(part.data_ptr() for part in parts), *sizes)


def _structure(layer: DenseLayer, dtype: torch.dtype) -> _Layer:
    projection = layer.projection
    assert projection.num_others == 0
    assert projection.cos_sin.is_contiguous()
    weights = projection.packed, layer.out, layer.gate_up, layer.down
    norms = projection.q_norm, projection.k_norm, layer.post_norm, projection.cos_sin, layer.sinks
    for vector in norms:
        assert vector is None or vector.dtype is torch.float32
    sizes = projection.num_heads, projection.num_kv_heads, projection.head_dim
    return _Layer(
        *(_weight(each, dtype) for each in weights),
        *(None if vector is None else vector.data_ptr() for vector in norms),
        *sizes, projection.cos_sin.shape[1], layer.window,
        projection.eps, layer.eps, layer.scale, DTYPE_CODES[dtype],
    )  # fmt: skip


def _weight(packed: PackedLinear, dtype: torch.dtype) -> _Weight:
    assert packed.group_size or packed.data.dtype is dtype
    bias = None if packed.bias is None else packed.bias.data_ptr()
    sizes = packed.out_features, packed.in_features, packed.group_size
    return _Weight(packed.data.data_ptr(), bias, *sizes, WeightFormat(packed.format))
