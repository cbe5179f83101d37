"""Root mean square norms in C."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from surestep_kernels.columns.cpu.binding import DTYPE_CODES, CFunction, Library


def load(library: Library) -> dict[str, CFunction]:
    """Return the ops of this folder."""
    run = library.short("rms_norm", "4P f 2l i")
    return {"rms_norm": partial(rms_norm, run), "add_rms_norm": partial(add_rms_norm, run)}


def rms_norm(run: CFunction, x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Copy x first if it is a slice; otherwise as rms_norm_reference."""
    x, width = x.contiguous(), x.shape[-1]
    assert weight.dtype is torch.float32
    assert weight.numel() == width
    out, dtype = torch.empty_like(x), DTYPE_CODES[x.dtype]
    pointers = out.data_ptr(), x.data_ptr(), None, weight.data_ptr()
    run(*pointers, eps, x.numel() // width, width, dtype)
    return out


def add_rms_norm(run: CFunction, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    rows, width = shape = x.shape
    assert x.is_contiguous()
    assert residual.is_contiguous()
    assert x.dtype is residual.dtype
    assert weight.dtype is torch.float32
    assert residual.shape == shape
    assert weight.numel() == width
    out, dtype = torch.empty_like(x), DTYPE_CODES[x.dtype]
    pointers = out.data_ptr(), x.data_ptr(), residual.data_ptr(), weight.data_ptr()
    run(*pointers, eps, rows, width, dtype)
    return out
