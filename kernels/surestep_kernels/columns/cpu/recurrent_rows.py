"""RecurrentRows as the C functions of recurrent ops take them."""

from __future__ import annotations

import torch

from surestep_kernels.recurrent_rows import RecurrentRows

from .binding import pointers


def row_pointers(rows: RecurrentRows) -> list[int]:
    """Return where the columns of rows lie: not `chunked`, as it is processed token by token."""
    slots, *columns, _, _ = rows
    assert slots.dtype is torch.int64
    assert all(column.dtype is torch.int32 for column in columns)
    return pointers(slots, *columns)
