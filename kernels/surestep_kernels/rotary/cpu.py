"""Rotary positions in C."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from surestep_kernels.columns.cpu.binding import DTYPE_CODES, CFunction, Library, token_stride

from .reference import Sections


def load(library: Library) -> dict[str, CFunction]:
    """Return the op."""
    return {"rotary": partial(rotary, library.short("rotary", "4P 7l i"))}


def rotary(
    run: CFunction,
    q: Tensor,
    k: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    sections: Sections | None = None,
) -> None:
    """Rotate q and k, which may be slices of one projection. Sections are not supported."""
    assert sections is None
    rows, q_heads, head_dim = q.shape
    strides, kv_heads = (token_stride(q), token_stride(k)), k.shape[1]
    assert q.dtype is k.dtype
    assert positions.dtype is torch.int64
    assert cos_sin.dtype is torch.float32
    assert cos_sin.is_contiguous()
    pointers = q.data_ptr(), k.data_ptr(), positions.data_ptr(), cos_sin.data_ptr()
    sizes = rows, *strides, q_heads, kv_heads, head_dim, cos_sin.shape[1]
    run(*pointers, *sizes, DTYPE_CODES[q.dtype])
