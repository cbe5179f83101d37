"""ctypes bindings of the C kernels, and the element types they support."""

from __future__ import annotations

from collections.abc import Callable
from ctypes import CDLL, Structure, c_float, c_int, c_void_p
from typing import Any

import torch

from surestep_kernels.store_kv import FP8, INT8, LayerCache

DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1}  # as in columns/cpu/vec.h
CACHE_CODES = {**DTYPE_CODES, FP8: 2, INT8: 3}


class CachePages(Structure):
    """CachePages of columns/cpu/ops.h."""

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


def bind(library: CDLL, op: str, arguments: list[Any], result: Any = None) -> Callable[..., Any]:
    """Return the C function of an op, by the ctypes of its arguments and result (None = void)."""
    function = getattr(library, f"surestep_{op}")
    function.argtypes, function.restype = arguments, result
    return function  # type: ignore[no-any-return]
