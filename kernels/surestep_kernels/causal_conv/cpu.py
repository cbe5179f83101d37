"""Causal convolution in C."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from surestep_kernels.columns.cpu.binding import (
    DTYPE_CODES,
    CFunction,
    Library,
    pointers,
    recurrent_row_pointers,
)
from surestep_kernels.recurrent_rows import ConvState, RecurrentRows


def load(library: Library) -> dict[str, CFunction]:
    """Return the op."""
    run = library.long("causal_conv", "12P 5l i")
    return {"causal_conv": partial(causal_conv, run)}


def causal_conv(
    run: CFunction, x: Tensor, weight: Tensor, conv: ConvState, rows: RecurrentRows
) -> Tensor:
    """Convolve x, which may be a slice of a projection."""
    tokens, channels = x.shape
    taps, (_, lines, _) = len(weight), conv.inputs.shape
    assert x.stride(1) == 1
    assert x.dtype is conv.inputs.dtype is conv.snapshots.dtype
    assert weight.dtype is torch.float32
    assert weight.is_contiguous()
    out = x.new_empty(tokens, channels)
    data = pointers(out, x, weight, conv.inputs, conv.snapshots)
    sizes = len(rows.slots), x.stride(0), channels, taps, lines
    run(*data, *recurrent_row_pointers(rows), *sizes, DTYPE_CODES[x.dtype])
    return out
