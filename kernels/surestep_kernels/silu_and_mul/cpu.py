"""Gated activations in C."""

from __future__ import annotations

from functools import partial

from torch import Tensor

from surestep_kernels.columns.cpu.binding import DTYPE_CODES, CFunction, Library


def load(library: Library) -> dict[str, CFunction]:
    """Return the op."""
    return {"silu_and_mul": partial(activate, library.short("silu_and_mul", "2P 2l i"))}


def activate(run: CFunction, x: Tensor) -> Tensor:
    """Run an op that makes a row of each row of x twice its width."""
    rows, width = x.shape
    assert x.is_contiguous()
    out, dtype = x.new_empty(rows, width // 2), DTYPE_CODES[x.dtype]
    run(out.data_ptr(), x.data_ptr(), rows, width // 2, dtype)
    return out
