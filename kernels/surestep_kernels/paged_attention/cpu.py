"""Paged attention in C."""

from __future__ import annotations

from ctypes import byref
from functools import partial

import torch
from surestep_common.errors import InvalidRequest
from torch import Tensor

from surestep_kernels.columns.cpu.binding import (
    DTYPE_CODES,
    CFunction,
    Library,
    pointers,
    token_stride,
)
from surestep_kernels.store_kv import LayerCache
from surestep_kernels.store_kv.cpu import WIDTH, CachePages

from .case import AttentionCase
from .reference import AttentionRows

MAX_HEAD_DIM, MAX_GROUP = 512, 36  # as in columns/cpu/ops.h and paged_attention/attention.h


def refuse_unsupported(case: AttentionCase) -> None:
    """Raise InvalidRequest for attention that these kernels do not support."""
    if case.latent:  # none of it is used
        return
    if case.block_size % WIDTH:
        raise _unsupported(f"block_size {case.block_size}", "block_size")
    if case.head_dim % WIDTH or case.head_dim > MAX_HEAD_DIM or case.group > MAX_GROUP:
        raise _unsupported(f"{case.group} heads of {case.head_dim} elements to a key", "model")


def _unsupported(what: str, param: str) -> InvalidRequest:
    return InvalidRequest(f"{what} on a cpu needs attention_backend torch", param=param)


def load(library: Library) -> dict[str, CFunction]:
    """Return the op."""
    run = library.long("paged_attention", "9P 8l 2f i")
    return {"paged_attention": partial(paged_attention, run)}


def paged_attention(
    run: CFunction,
    q: Tensor,
    cache: LayerCache,
    rows: AttentionRows,
    scale: float,
    *,
    window: int = 0,
    sinks: Tensor | None = None,
    softcap: float = 0.0,
) -> Tensor:
    """Attend as paged_attention_reference does; q may be a slice of a projection."""
    tokens, heads, head_dim = q.shape
    _, kv_heads, block_size, _ = cache.k.shape
    assert cache.head_dim == head_dim
    assert window >= 0
    assert softcap >= 0
    assert sinks is None or (sinks.shape == (heads,) and sinks.dtype is torch.float32)
    out = q.new_empty(tokens, heads, head_dim)
    pages = CachePages.of(cache, q.dtype)
    streams = out.data_ptr(), q.data_ptr(), byref(pages)
    sinks_pointer = None if sinks is None else sinks.data_ptr()
    shape = kv_heads, heads // kv_heads, head_dim, block_size, window
    sizes = rows.start.shape[0], rows.block_tables.shape[1], token_stride(q), *shape
    numbers = scale, softcap, DTYPE_CODES[q.dtype]
    run(*streams, *row_pointers(rows), wider_pointer(rows), sinks_pointer, *sizes, *numbers)
    return out


def row_pointers(rows: AttentionRows) -> list[int]:
    """Return where the columns of rows lie."""
    block_tables, slots, cu_rows, start = rows[:4]
    assert block_tables.dtype is cu_rows.dtype is start.dtype is torch.int32
    assert slots.dtype is torch.int64
    assert block_tables.is_contiguous()
    assert slots.is_contiguous()
    (count,) = start.shape  # Tensor.__len__ takes microseconds
    assert slots.shape == (count,)
    assert cu_rows.shape == (count + 1,)
    return pointers(block_tables, slots, cu_rows, start)


def wider_pointer(rows: AttentionRows) -> int | None:
    """Return where it lies by how much the windows of rows are wider."""
    if rows.wider is None:
        return None
    assert rows.wider.dtype is torch.int32
    assert rows.wider.is_contiguous()
    assert rows.wider.shape == rows.start.shape
    return rows.wider.data_ptr()
