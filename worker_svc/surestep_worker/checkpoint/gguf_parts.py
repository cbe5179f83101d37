"""Parts of tensors in GGUF files, read without the rest of them."""

from __future__ import annotations

import os

import torch
from surestep_common.errors import InvalidRequest
from surestep_common.gguf.header import BLOCK_TYPE_OF
from torch import Tensor

from .safetensors_header import Entry

_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def read_part(descriptor: int, entry: Entry, index: tuple[slice, ...]) -> Tensor:
    """Read some rows, and some columns of a matrix.

    Of a packed matrix the columns must be whole blocks, whose bytes u8[R, B] are returned. Rows are
    in the order of other checkpoints. Raises InvalidRequest if the file cannot be read.
    """
    slices = [part.indices(size) for part, size in zip(index, entry.shape, strict=False)]
    begin, end, _ = slices[0]
    data = _read_rows(descriptor, entry, begin, end)
    dtype = _DTYPES.get(entry.dtype)
    rows = data if dtype is None else data.view(dtype)
    rows = rows if len(entry.shape) > 1 else rows.flatten()
    if len(slices) < 2:
        return rows
    block = BLOCK_TYPE_OF[entry.dtype]
    first, last, _ = slices[1]
    unit = block.nbytes if dtype is None else 1
    assert first % block.elements == last % block.elements == 0
    return rows[:, first // block.elements * unit : last // block.elements * unit]


def _read_rows(descriptor: int, entry: Entry, begin: int, end: int) -> Tensor:
    """Return the bytes u8[R, B] of rows `begin` to `end`."""
    if not entry.interleaved_heads:
        return _read_stored(descriptor, entry, begin, end)
    order = _stored_rows(entry.shape[0], entry.interleaved_heads)[begin:end]
    first, last = int(order.min()), int(order.max()) + 1
    return _read_stored(descriptor, entry, first, last)[order - first]


def _stored_rows(rows: int, heads: int) -> Tensor:
    """Return where each row stands, i64[N]: the halves of a head are stored interleaved."""
    stored = torch.arange(rows).view(heads, rows // heads // 2, 2)
    return stored.transpose(1, 2).flatten()


def _read_stored(descriptor: int, entry: Entry, begin: int, end: int) -> Tensor:
    row = entry.nbytes // entry.shape[0]
    data = torch.empty(max(end - begin, 0), row, dtype=torch.uint8)
    rest = memoryview(data.numpy()).cast("B")  # type: ignore[arg-type]  # numpy's stubs
    at = entry.begin + begin * row
    while rest:
        try:
            length = os.preadv(descriptor, [rest], at)  # 2 GiB at most
        except OSError as error:
            why = error.strerror
            raise InvalidRequest(f"cannot read {entry.file}: {why}", param="model") from error
        if not length:
            raise InvalidRequest(f"cannot read {entry.file}: it has become shorter", param="model")
        at, rest = at + length, rest[length:]
    return data
