"""The C kernels of latent attention, called through ctypes like those of ops.py."""

from __future__ import annotations

from collections.abc import Callable
from ctypes import CDLL, c_float, c_int, c_long, c_void_p
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from surestep_kernels.paged_attention import AttentionRows
from surestep_kernels.store_kv import FP8
from surestep_kernels.table import LatentOps

from .binding import DTYPE_CODES, bind

_PAGE_CODES = {**DTYPE_CODES, FP8: 2}  # as in columns/cpu/latent.h

_P, _L, _I, _F = c_void_p, c_long, c_int, c_float
_ATTEND: list[Any] = [*[_P] * 8, *[_L] * 7, _F, _I, _I]
_CHOOSE: list[Any] = [*[_P] * 8, *[_L] * 6, _I, _I]


@dataclass(frozen=True, slots=True)
class CpuLatentOps:
    """The ops of one compiled library; the C function of each op is a field."""

    c_attend: Callable[..., None]
    c_choose: Callable[..., int]

    @classmethod
    def load(cls, library: Path) -> CpuLatentOps:
        """Open a library by its file name (see `file_of`). Raises OSError if that fails."""
        opened = CDLL(str(library))
        choose = bind(opened, "latent_choose", _CHOOSE, c_int)
        return cls(bind(opened, "latent_attend", _ATTEND), choose)

    @property
    def table(self) -> LatentOps:
        """The ops by name."""
        return LatentOps(self.attend, self.choose)

    def attend(
        self,
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
        pointers = out.data_ptr(), q.data_ptr(), pages.data_ptr(), *_row_pointers(rows)
        top_k = 0 if chosen is None else chosen.shape[1]
        sizes = len(rows.start), rows.block_tables.shape[1], heads, dim, value_width
        self.c_attend(
            *pointers,
            None if chosen is None else chosen.data_ptr(),
            *(*sizes, pages.shape[1], top_k, scale),
            *(DTYPE_CODES[q.dtype], _PAGE_CODES[pages.dtype]),
        )
        return out

    def choose(
        self, q: Tensor, weights: Tensor, pages: Tensor, rows: AttentionRows, top_k: int
    ) -> Tensor:
        """Choose as latent_choice_reference does. Raises MemoryError."""
        tokens, heads, dim = q.shape
        assert q.is_contiguous()
        assert weights.dtype is torch.float32
        assert weights.is_contiguous()
        assert pages.shape[2] == dim
        out = torch.zeros(tokens, top_k, dtype=torch.int32)
        pointers = out, q, weights, pages
        sizes = len(rows.start), rows.block_tables.shape[1], heads, dim, pages.shape[1], top_k
        data = (tensor.data_ptr() for tensor in pointers)
        dtypes = DTYPE_CODES[q.dtype], _PAGE_CODES[pages.dtype]
        if not self.c_choose(*data, *_row_pointers(rows), *sizes, *dtypes):
            raise MemoryError("scores of positions")
        return out


def _row_pointers(rows: AttentionRows) -> list[int]:
    block_tables, slots, cu_rows, start, _ = rows
    assert block_tables.dtype is cu_rows.dtype is start.dtype is torch.int32
    assert slots.dtype is torch.int64
    assert block_tables.is_contiguous()
    assert len(slots) == len(start) == len(cu_rows) - 1
    return [tensor.data_ptr() for tensor in (block_tables, slots, cu_rows, start)]
