"""Calls of C functions, as the cpu.py of an op makes them."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from ctypes import CDLL, PyDLL, c_float, c_int, c_int64, c_long, c_void_p
from pathlib import Path
from struct import pack
from typing import Any

import torch
from torch import Tensor

from surestep_kernels.recurrent_rows import RecurrentRows
from surestep_kernels.slot_state import SlotState

CFunction = Callable[..., Any]
_TYPES = {"P": c_void_p, "l": c_long, "i": c_int, "q": c_int64, "f": c_float}
DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1}  # as in columns/cpu/vec.h


class Library:
    """The compiled kernels, opened.

    Each row of a result depends on that row's inputs alone, bit for bit: not on the number of
    rows, the other rows or the number of threads.
    """

    def __init__(self, file: Path) -> None:
        """Open a library by its file name (see `file_of`). Raises OSError if that fails."""
        self._locked, self._unlocked = PyDLL(str(file)), CDLL(str(file))

    def short(self, op: str, arguments: str, result: str = "") -> CFunction:
        """Bind a function that keeps the interpreter lock: handing it over would take longer.

        Arguments and result are written as in the module struct: "2P l" = 2 pointers and a long.
        """
        return _bind(self._locked, op, arguments, result)

    def long(self, op: str, arguments: str, result: str = "") -> CFunction:
        """Bind a function that releases the interpreter lock."""
        return _bind(self._unlocked, op, arguments, result)

    def set_num_threads(self, num_threads: int) -> None:
        """Set the number of threads that one op uses, the calling thread included.

        torch gets one: its few ops here are small, and its OpenMP threads spin between them, which
        costs far more than it gains as soon as another process needs the cores.
        """
        self.long("set_num_threads", "i")(num_threads)
        torch.set_num_threads(1)


def _bind(library: CDLL, op: str, arguments: str, result: str) -> CFunction:
    function = getattr(library, f"surestep_{op}")
    function.argtypes = [
        _TYPES[code]
        for count, code in re.findall(r"(\d*)([a-zA-Z])", arguments)
        for _ in range(int(count or 1))
    ]
    function.restype = _TYPES[result] if result else None
    return function  # type: ignore[no-any-return]


def pointers(*tensors: Tensor) -> list[int]:
    """Return where the tensors lie."""
    return [tensor.data_ptr() for tensor in tensors]


def recurrent_row_pointers(rows: RecurrentRows) -> list[int]:
    """Return where the columns of rows lie: not `chunked`, as it is processed token by token."""
    slots, *columns, _, _ = rows
    assert slots.dtype is torch.int64
    assert all(column.dtype is torch.int32 for column in columns)
    return pointers(slots, *columns)


def struct(tensors: Sequence[Tensor], *sizes: int) -> bytes:
    """Return the C struct of a named tuple: pointers to the tensors, followed by their sizes."""
    return pack(f"{len(tensors)}P{len(sizes)}l", *[x.data_ptr() for x in tensors], *sizes)


def table_sizes(state: SlotState, block_size: int, num_blocks: int) -> bytes:
    """Return the sizes of slots as table_sizes in columns/cpu/step.h."""
    lines, width = state.tokens.shape
    groups, _, pages = state.block_tables.shape
    return pack("6l", lines, width, groups, pages, block_size, num_blocks)


def token_stride(x: Tensor) -> int:
    """Return the elements from token to token of x [T, H, D], whose heads must be contiguous."""
    stride = x.stride()
    assert stride[2] == 1
    assert stride[1] == x.shape[2]
    return stride[0]


def empty_columns(dtype: torch.dtype, sizes: list[int]) -> tuple[Tensor, ...]:
    """Return one-dimensional tensors of these sizes, allocated together."""
    return torch.split_with_sizes(torch.empty(sum(sizes), dtype=dtype), sizes)


def check_memory(done: int) -> None:
    """Raise MemoryError if a function found none to work in."""
    if not done:
        raise MemoryError("no memory to choose tokens in")
