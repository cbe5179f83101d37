"""Shares of adapters in C."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from surestep_kernels.columns.cpu.binding import (
    DTYPE_CODES,
    CFunction,
    Library,
    check_memory,
    pointers,
)

from .reference import AdapterWeights


def load(library: Library) -> dict[str, CFunction]:
    """Return the op."""
    run = library.long("add_adapters", "8P 6l 2i", "i")
    return {"add_adapters": partial(add_adapters, run)}


def add_adapters(
    run: CFunction, y: Tensor, x: Tensor, places: Tensor, weights: AdapterWeights
) -> None:
    a, b, ranks, scales, spans = weights
    _, parts, most, k = a.shape
    assert y.is_contiguous()
    assert x.is_contiguous()
    assert a.is_contiguous()
    assert b.is_contiguous()
    assert x.dtype is a.dtype is b.dtype
    assert places.dtype is ranks.dtype is torch.int32
    assert places.shape == (len(x),) == (len(y),)
    assert x.shape[1] == k
    assert y.shape[1] == b.shape[2]
    sizes = len(x), y.shape[1], k, parts, most, len(spans)
    codes = DTYPE_CODES[x.dtype], DTYPE_CODES[y.dtype]
    check_memory(run(*pointers(y, x, places, a, b, ranks, scales, spans), *sizes, *codes))
