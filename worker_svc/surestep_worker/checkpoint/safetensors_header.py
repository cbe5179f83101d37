"""The header of a safetensors file: names, types and places of its tensors.

It is read without torch, and everything in it is checked. Format:
https://huggingface.co/docs/safetensors. Eight bytes hold the header's length, the header is a JSON
object, the tensors' bytes follow without gaps.
"""

from __future__ import annotations

import json
import math
import stat
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from surestep_common.errors import InvalidRequest

_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 100_000_000  # as the format's own library has it
_MAX_DIMS = 16
_MAX_ELEMENTS = 1 << 62
_MAX_NAME = 200  # characters shown
_ITEM_BYTES = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0"), 1),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 2),
    **dict.fromkeys(("U32", "I32", "F32"), 4),
    **dict.fromkeys(("U64", "I64", "F64"), 8),
}


class Entry(NamedTuple):
    """A tensor in a file."""

    file: Path
    dtype: str  # as safetensors calls it: "BF16"
    shape: tuple[int, ...]
    begin: int  # byte of the file
    nbytes: int
    # Heads whose two halves have their rows interleaved in the file; 0: rows are in order.
    interleaved_heads: int = 0

    @property
    def end(self) -> int:
        """Offset of the first byte after the tensor."""
        return self.begin + self.nbytes


def read_header(path: Path) -> dict[str, Entry]:
    """Return tensors by name. Raises InvalidRequest naming the file, and the tensor at fault."""
    try:
        size, header = _read(path)
    except OSError as error:
        raise InvalidRequest(f"cannot read {path}: {error.strerror}", param="model") from error
    try:
        parsed = json.loads(header)
    except (ValueError, RecursionError):
        parsed = None
    if not isinstance(parsed, dict):
        _refuse(path, "its header is no JSON object")
    parsed.pop("__metadata__", None)
    start = _LENGTH_BYTES + len(header)
    entries = {name: _entry(path, name, about, start) for name, about in parsed.items()}
    _check_places(path, entries, start, size)
    return entries


def _read(path: Path) -> tuple[int, bytes]:
    """Return the size of the file, and its header."""
    about = path.stat()  # first: opening a pipe may block for ever
    size = about.st_size
    if not stat.S_ISREG(about.st_mode):
        _refuse(path, "it is not a file")
    with path.open("rb") as file:
        length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        if size <= _LENGTH_BYTES:
            _refuse(path, f"it has {size} bytes only")
        if length > min(_MAX_HEADER_BYTES, size - _LENGTH_BYTES):
            what = f"a header of {length} bytes in a file of {size}"
            _refuse(path, f"{what}: cut off, or another format")
        return size, file.read(length)


def _entry(path: Path, name: str, about: Any, start: int) -> Entry:
    match about:
        case {
            "dtype": str(dtype),
            "shape": [*shape],
            "data_offsets": [int(begin), int(end)],
        } if len(shape) <= _MAX_DIMS and all(map(_is_size, (*shape, begin, end))):
            pass
        case _:
            _refuse(path, f"tensor {shown(name)} is described wrongly")
    nbytes = end - begin
    elements = math.prod(shape)
    if nbytes < 0 or elements > _MAX_ELEMENTS:
        _refuse(path, f"tensor {shown(name)} has an impossible size")
    if nbytes != elements * _ITEM_BYTES.get(dtype, 0) and dtype in _ITEM_BYTES:
        _refuse(path, f"tensor {shown(name)} has {nbytes} bytes, which are no {dtype} of {shape}")
    return Entry(path, dtype, tuple(shape), start + begin, nbytes)


def _is_size(value: object) -> bool:
    return type(value) is int and 0 <= value <= _MAX_ELEMENTS


def _check_places(path: Path, entries: dict[str, Entry], start: int, size: int) -> None:
    """Check that the tensors fill the rest of the file, one after the other."""
    at = start
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)):
        if entry.end > size:
            _refuse(
                path,
                f"tensor {shown(name)} ends at byte {entry.end} of {size}: the file is cut off",
            )
        if entry.begin != at:
            _refuse(path, f"tensor {shown(name)} begins at byte {entry.begin} where {at} is free")
        at = entry.end
    if at != size:
        _refuse(path, f"{size - at} bytes behind its tensors")


def _refuse(path: Path, why: str) -> NoReturn:
    raise InvalidRequest(f"cannot read {path}: {why}", param="model")


def shown(name: str) -> str:
    """Return the name of a tensor, safe for a message: names are untrusted."""
    return name if name.isprintable() and len(name) <= _MAX_NAME else ascii(name[:_MAX_NAME])
