"""Gating in C."""

from __future__ import annotations

from functools import partial

from torch import Tensor

from surestep_kernels.columns.cpu.binding import DTYPE_CODES, CFunction, Library, pointers


def load(library: Library) -> dict[str, CFunction]:
    """Return the op."""
    run = library.long("mul_sigmoid", "2P 4l i")
    return {"mul_sigmoid": partial(mul_sigmoid, run)}


def mul_sigmoid(run: CFunction, x: Tensor, gate: Tensor) -> None:
    """Gate x in place; gate may be a slice of a projection."""
    assert x.is_contiguous()
    assert gate.stride(1) == 1
    assert x.dtype is gate.dtype
    sizes = *x.shape, gate.shape[1], gate.stride(0)
    run(*pointers(x, gate), *sizes, DTYPE_CODES[x.dtype])
