"""Gated norms in C."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from surestep_kernels.columns.cpu.binding import DTYPE_CODES, CFunction, Library, pointers


def load(library: Library) -> dict[str, CFunction]:
    """Return the op."""
    run = library.long("rms_norm_gated", "4P f 4l i")
    return {"rms_norm_gated": partial(rms_norm_gated, run)}


def rms_norm_gated(run: CFunction, x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalise and gate x; gate may be a slice of a projection."""
    tokens, groups, width = x.shape
    assert x.is_contiguous()
    assert gate.shape == x.shape
    assert gate.stride()[1:] == (width, 1)
    assert x.dtype is gate.dtype
    assert weight.dtype is torch.float32
    out = torch.empty_like(x)
    sizes = tokens, groups, width, gate.stride(0)
    run(*pointers(out, x, gate, weight), eps, *sizes, DTYPE_CODES[x.dtype])
    return out
