"""Attention to latents in C."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from surestep_kernels.columns.cpu.binding import DTYPE_CODES, CFunction, Library
from surestep_kernels.paged_attention import AttentionRows
from surestep_kernels.paged_attention.cpu import row_pointers
from surestep_kernels.store_kv import FP8

PAGE_CODES = {**DTYPE_CODES, FP8: 2}  # as in columns/cpu/latent.h


def load(library: Library) -> dict[str, CFunction]:
    """Return the op."""
    run = library.long("latent_attend", "8P 7l f 2i")
    return {"attend": partial(attend, run)}


def attend(
    run: CFunction,
    q: Tensor,
    pages: Tensor,
    rows: AttentionRows,
    scale: float,
    value_width: int,
    chosen: Tensor | None = None,
) -> Tensor:
    """Attend as attend_reference does."""
    tokens, heads, dim = q.shape
    assert q.is_contiguous()
    assert pages.shape[2] == dim
    assert chosen is None or (chosen.dtype is torch.int32 and chosen.is_contiguous())
    out = q.new_zeros(tokens, heads, value_width)
    streams = out.data_ptr(), q.data_ptr(), pages.data_ptr()
    top_k = 0 if chosen is None else chosen.shape[1]
    sizes = rows.start.shape[0], rows.block_tables.shape[1], heads, dim, value_width
    run(
        *streams,
        *row_pointers(rows),
        None if chosen is None else chosen.data_ptr(),
        *sizes,
        pages.shape[1],
        top_k,
        scale,
        DTYPE_CODES[q.dtype],
        PAGE_CODES[pages.dtype],
    )
    return out
