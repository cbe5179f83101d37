"""The gated activation of gpt-oss in C."""

from __future__ import annotations

from functools import partial

from torch import Tensor

from surestep_kernels.columns.cpu.binding import DTYPE_CODES, CFunction, Library


def load(library: Library) -> dict[str, CFunction]:
    """Return the op."""
    run = library.short("clamped_swiglu", "2P f 2l i")
    return {"clamped_swiglu": partial(clamped_swiglu, run)}


def clamped_swiglu(run: CFunction, x: Tensor, limit: float) -> Tensor:
    rows, width = x.shape
    assert x.is_contiguous()
    assert limit > 0
    out, dtype = x.new_empty(rows, width // 2), DTYPE_CODES[x.dtype]
    run(out.data_ptr(), x.data_ptr(), limit, rows, width // 2, dtype)
    return out
