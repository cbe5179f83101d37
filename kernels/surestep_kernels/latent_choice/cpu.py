"""The choice of positions in C."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from surestep_kernels.columns.cpu.binding import DTYPE_CODES, CFunction, Library, pointers
from surestep_kernels.latent_attention.cpu import PAGE_CODES
from surestep_kernels.paged_attention import AttentionRows
from surestep_kernels.paged_attention.cpu import row_pointers


def load(library: Library) -> dict[str, CFunction]:
    """Return the op."""
    run = library.long("latent_choose", "8P 6l 2i", "i")
    return {"choose": partial(choose, run)}


def choose(
    run: CFunction, q: Tensor, weights: Tensor, pages: Tensor, rows: AttentionRows, top_k: int
) -> Tensor:
    """Choose as latent_choice_reference does. Raises MemoryError."""
    tokens, heads, dim = q.shape
    assert q.is_contiguous()
    assert weights.dtype is torch.float32
    assert weights.is_contiguous()
    assert pages.shape[2] == dim
    out = torch.zeros(tokens, top_k, dtype=torch.int32)
    streams = pointers(out, q, weights, pages)
    table_width, block_size = rows.block_tables.shape[1], pages.shape[1]
    sizes = rows.start.shape[0], table_width, heads, dim, block_size, top_k
    dtypes = DTYPE_CODES[q.dtype], PAGE_CODES[pages.dtype]
    if not run(*streams, *row_pointers(rows), *sizes, *dtypes):
        raise MemoryError("scores of positions")
    return out
