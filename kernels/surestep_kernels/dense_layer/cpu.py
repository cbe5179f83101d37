"""Dense layers in one C call."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import Structure, addressof, byref, c_float, c_int, c_long, c_void_p, sizeof
from functools import partial
from typing import Any

import torch
from torch import Tensor

from surestep_kernels.columns.cpu.binding import DTYPE_CODES, CFunction, Library
from surestep_kernels.linear import PackedLinear, WeightFormat
from surestep_kernels.paged_attention.cpu import row_pointers, wider_pointer
from surestep_kernels.store_kv import LayerCache
from surestep_kernels.store_kv.cpu import CachePages

from .reference import DenseLayer, LayerTokens

# The ops that the call is made of.
PARTS = (
    "rms_norm",
    "add_rms_norm",
    "linear",
    "silu_and_mul",
    "rotary",
    "store_kv",
    "paged_attention",
)
_VECTORS = "q_norm", "k_norm", "post_norm", "next_norm", "cos_sin", "sinks"


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
    """Struct dense_layer of dense_layer/cpu.c."""

    _fields_ = (
        *((name, _Weight) for name in ("qkv", "out", "gate_up", "down")),
        *((name, c_void_p) for name in _VECTORS),
        *((n, c_long) for n in ("q_heads", "kv_heads", "head_dim", "rotary_dim", "window")),
        *((name, c_float) for name in ("head_eps", "eps", "scale")),
        ("dtype", c_int),
    )


class _Tokens(Structure):
    """Struct layer_tokens of dense_layer/cpu.c."""

    _fields_ = (
        *((name, c_void_p) for name in ("positions", "kv_slots", "block_tables", "slots")),
        *((name, c_void_p) for name in ("cu_rows", "start", "wider")),
        *((name, c_long) for name in ("tokens", "rows", "table_width", "block_size")),
    )


def load(library: Library) -> CFunction:
    """Return a function of layers and the norms behind them that makes them one call."""
    return partial(_OneCall, library.long("dense_layers", "6P l"))


class _OneCall:
    """Layers whose addresses are looked up once; implements RunDenseLayers."""

    def __init__(
        self, run: CFunction, layers: Sequence[DenseLayer], next_norms: Sequence[Tensor]
    ) -> None:
        self._layers = list(zip(layers, next_norms, strict=True))  # what addresses point to
        self._run = run
        self._structures = dict[torch.dtype, Any]()
        self._pages = dict[int, tuple[object, Any]]()  # by first layer, and by where they are

    def __call__(
        self,
        x: Tensor,
        residual: Tensor,
        places: Sequence[tuple[LayerTokens, LayerCache]],
        first: int = 0,
    ) -> Tensor:
        dtype, (layer, _) = x.dtype, self._layers[first]
        assert x.is_contiguous()
        assert residual.is_contiguous()
        assert x.shape == (residual.shape[0], layer.projection.packed.in_features)
        assert residual.shape[1] == layer.down.out_features
        assert dtype is residual.dtype
        if dtype not in self._structures:
            self._structures[dtype] = _structures(self._layers, dtype)
        assert first + len(places) <= len(self._layers)
        layers = byref(self._structures[dtype], first * sizeof(_Layer))
        tokens = (c_void_p * len(places))(*(_address(*place) for place in places))
        pages = self._pages_of(first, [cache for _, cache in places], dtype)
        out = torch.empty_like(residual)
        streams = out.data_ptr(), x.data_ptr(), residual.data_ptr()
        self._run(*streams, layers, tokens, pages, len(places))
        return out

    def _pages_of(self, first: int, caches: Sequence[LayerCache], dtype: torch.dtype) -> Any:
        where = [(cache.k.data_ptr(), cache.v.data_ptr(), cache.k.dtype) for cache in caches]
        known, pages = self._pages.get(first, (None, None))
        if known != where or any(cache.scales is not None for cache in caches):
            pages = (CachePages * len(caches))(*(CachePages.of(cache, dtype) for cache in caches))
            self._pages[first] = where, pages
        return pages


def _address(tokens: LayerTokens, cache: LayerCache) -> int:
    if tokens.prepared is None:
        tokens.prepared = _tokens(tokens, cache.k.shape[2])
    return addressof(tokens.prepared)


def _tokens(tokens: LayerTokens, block_size: int) -> _Tokens:
    positions, kv_slots, rows = tokens.positions, tokens.kv_slots, tokens.rows
    assert positions.dtype is kv_slots.dtype is torch.int64
    pointers = positions.data_ptr(), kv_slots.data_ptr(), *row_pointers(rows), wider_pointer(rows)
    sizes = positions.shape[0], rows.start.shape[0], rows.block_tables.shape[1], block_size
    return _Tokens(*pointers, *sizes)


def _structures(layers: Sequence[tuple[DenseLayer, Tensor]], dtype: torch.dtype) -> Any:
    return (_Layer * len(layers))(*(_structure(*each, dtype) for each in layers))


def _structure(layer: DenseLayer, next_norm: Tensor, dtype: torch.dtype) -> _Layer:
    projection = layer.projection
    assert projection.num_others == 0
    assert projection.cos_sin.is_contiguous()
    weights = projection.packed, layer.out, layer.gate_up, layer.down
    assert next_norm.shape == (layer.down.out_features,)
    of_heads = projection.q_norm, projection.k_norm
    vectors = *of_heads, layer.post_norm, next_norm, projection.cos_sin, layer.sinks
    for vector in vectors:
        assert vector is None or vector.dtype is torch.float32
    sizes = projection.num_heads, projection.num_kv_heads, projection.head_dim
    return _Layer(
        *(_weight(each, dtype) for each in weights),
        *(None if vector is None else vector.data_ptr() for vector in vectors),
        *sizes,
        projection.cos_sin.shape[1],
        layer.window,
        projection.eps,
        layer.eps,
        layer.scale,
        DTYPE_CODES[dtype],
    )


def _weight(packed: PackedLinear, dtype: torch.dtype) -> _Weight:
    assert packed.group_size or packed.data.dtype is dtype
    bias = None if packed.bias is None else packed.bias.data_ptr()
    sizes = packed.out_features, packed.in_features, packed.group_size
    return _Weight(packed.data.data_ptr(), bias, *sizes, WeightFormat(packed.format))
