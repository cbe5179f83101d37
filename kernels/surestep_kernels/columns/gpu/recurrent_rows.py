"""Bounds-checked access to RecurrentRows, shared by the recurrent kernels."""

from __future__ import annotations

import triton
import triton.language as tl

# Columns of a batch may begin anywhere in a buffer: do not specialise on their alignment.
COLUMNS = [
    "slots_ptr",
    "cu_rows_ptr",
    "start_ptr",
    "pending_ptr",
    "window_ptr",
    "snapshot_after_ptr",
    "snapshot_line_ptr",
    "chunked_ptr",
]


@triton.jit
def row_tokens(cu_rows_ptr, row):
    """Return the first token of a row and the number of its tokens."""
    first = tl.load(cu_rows_ptr + row).to(tl.int64)
    return first, tl.load(cu_rows_ptr + row + 1) - first.to(tl.int32)


@triton.jit
def row_chunked(chunked_ptr, row, count, CHUNK: tl.constexpr):
    """Return how many of a row's `count` tokens are computed in chunks, all of them whole."""
    most = tl.maximum(tl.minimum(tl.load(chunked_ptr + row), count), 0)
    return most // CHUNK * CHUNK


@triton.jit
def row_tail(cu_rows_ptr, chunked_ptr, row, CHUNK: tl.constexpr):
    """Return the first token after the row's chunks, and the tokens from there on and in chunks."""
    first, count = row_tokens(cu_rows_ptr, row)
    chunked = row_chunked(chunked_ptr, row, count, CHUNK)
    return first + chunked, count - chunked, chunked


@triton.jit
def row_slot(slots_ptr, row, num_slots):
    """Return the slot of a row, and whether it exists."""
    slot = tl.load(slots_ptr + row)
    return slot, (slot >= 0) & (slot < num_slots)


@triton.jit
def row_pending(pending_ptr, row, RECORDS: tl.constexpr):
    """Return the number of records that the row folds."""
    return tl.minimum(tl.maximum(tl.load(pending_ptr + row), 0), RECORDS)


@triton.jit
def row_snapshot(snapshot_after_ptr, snapshot_line_ptr, row, num_lines):
    """Return after how many tokens the row copies its state (0 = never), and to which line."""
    line = tl.load(snapshot_line_ptr + row).to(tl.int64)
    inside = (line >= 0) & (line < num_lines)
    return tl.where(inside, tl.load(snapshot_after_ptr + row), 0), line
