"""The header of a GGUF file: its metadata, and names, types and places of its tensors.

Everything in it is checked, since files come from strangers: a count is believed only as far as the
file has bytes for it. Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. A magic
number, a version and two counts; pairs of keys and values; tensors; their bytes, aligned.
"""

from __future__ import annotations

import math
import stat
import struct
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, NoReturn

from surestep_common.errors import InvalidRequest

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_MAX_HEADER_BYTES = 100_000_000
_MAX_ITEMS = 1 << 23  # of all arrays together: tokens, their scores and types, merges
_MAX_DIMS = 4
_MAX_ELEMENTS = 1 << 62
_MAX_ALIGNMENT = 1 << 20
_MAX_SHOWN = 100  # characters of a name
_STRING, _ARRAY = 8, 9
_SCALARS = dict(enumerate("BbHhIif?")) | {10: "Q", 11: "q", 12: "d"}


class BlockType(NamedTuple):
    """Storage of a tensor's elements: blocks of so many elements in so many bytes."""

    name: str
    elements: int
    nbytes: int


BLOCK_TYPES = {
    0: BlockType("F32", 1, 4),
    1: BlockType("F16", 1, 2),
    2: BlockType("Q4_0", 32, 18),
    3: BlockType("Q4_1", 32, 20),
    6: BlockType("Q5_0", 32, 22),
    7: BlockType("Q5_1", 32, 24),
    8: BlockType("Q8_0", 32, 34),
    12: BlockType("Q4_K", 256, 144),
    13: BlockType("Q5_K", 256, 176),
    14: BlockType("Q6_K", 256, 210),
    30: BlockType("BF16", 1, 2),
}
BLOCK_TYPE_OF = {each.name: each for each in BLOCK_TYPES.values()}
# Types that are not read here, for a message.
_OTHER_TYPES = {
    4: "Q4_2",
    5: "Q4_3",
    9: "Q8_1",
    10: "Q2_K",
    11: "Q3_K",
    15: "Q8_K",
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    20: "IQ4_NL",
    21: "IQ3_S",
    22: "IQ2_S",
    23: "IQ4_XS",
    24: "I8",
    25: "I16",
    26: "I32",
    27: "I64",
    28: "F64",
    29: "IQ1_M",
    34: "TQ1_0",
    35: "TQ2_0",
    39: "MXFP4",
    40: "NVFP4",
}


class TensorPlace(NamedTuple):
    """A tensor of the file, or of another part of it."""

    file: Path
    type: BlockType
    shape: tuple[int, ...]  # outermost dimension first, as elsewhere; the file has them reversed
    begin: int  # byte of the file
    nbytes: int


class Header(NamedTuple):
    """Header in front of the weights. The tensors are those of all parts: see parts.py."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, TensorPlace]

    def number(self, key: str, default: float | None = None) -> Any:
        """Return a number; without `default` it must be there. Raises InvalidRequest."""
        value = self.metadata.get(key, default)
        if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
            return value
        return refuse(self.path, f"{key} is {'no number' if key in self.metadata else 'missing'}")

    def text(self, key: str, default: str | None = None) -> str:
        """Return a text; without `default` it must be there. Raises InvalidRequest."""
        value = self.metadata.get(key, default)
        if isinstance(value, str):
            return value
        return refuse(self.path, f"{key} is {'no text' if key in self.metadata else 'missing'}")

    def items(self, key: str, kind: type) -> list[Any]:
        """Return an array of items of one kind; [] without one. Raises InvalidRequest."""
        value = self.metadata.get(key, [])
        if isinstance(value, list) and all(type(item) is kind for item in value):
            return value
        return refuse(self.path, f"{key} is no array of {kind.__name__}")

    def read(self, place: TensorPlace) -> bytes:
        """Return the bytes of a small tensor. Raises InvalidRequest."""
        try:
            with place.file.open("rb") as file:
                file.seek(place.begin)
                data = file.read(place.nbytes)
        except OSError as error:
            raise InvalidRequest(f"cannot read {place.file}: {error.strerror}") from error
        if len(data) != place.nbytes:
            refuse(place.file, "it has become shorter")
        return data


def read_header(path: Path) -> Header:
    """Read the header of one file. Raises InvalidRequest naming it, and what is wrong in it."""
    try:
        about = path.stat()  # first: opening a pipe may block for ever
        if not stat.S_ISREG(about.st_mode):
            refuse(path, "it is not a file")
        with path.open("rb", buffering=1 << 20) as file:
            return _Reader(path, file, about.st_size).header()
    except OSError as error:
        raise InvalidRequest(f"cannot read {path}: {error.strerror}", param="model") from error


class _Reader:
    """Reads from front to back, and never more than the header may have."""

    def __init__(self, path: Path, file: BinaryIO, size: int) -> None:
        self._path = path
        self._file = file
        self._size = size
        self._left = min(size, _MAX_HEADER_BYTES)
        self._items_left = _MAX_ITEMS

    def header(self) -> Header:
        if self._left < len(_MAGIC) or self._take(len(_MAGIC)) != _MAGIC:
            refuse(self._path, "it is not a GGUF file")
        version = self._scalar("I")
        if version not in _VERSIONS:
            refuse(self._path, f"GGUF version {version} is not supported; supported: 2, 3")
        num_tensors, num_pairs = self._scalar("Q"), self._scalar("Q")
        metadata: dict[str, Any] = {}
        for _ in range(self._believed(num_pairs, 12)):
            key = self._string()
            if key in metadata:
                refuse(self._path, f"{shown(key)} stands in it twice")
            metadata[key] = self._value(self._scalar("I"), key)
        described = [self._tensor() for _ in range(self._believed(num_tensors, 24))]
        return Header(self._path, metadata, self._places(metadata, described))

    def _take(self, nbytes: int) -> bytes:
        if nbytes > self._left:
            refuse(self._path, "its header is cut off, or longer than the file or 100 MB: damaged?")
        self._left -= nbytes
        data = self._file.read(nbytes)
        if len(data) != nbytes:
            refuse(self._path, "it has become shorter")
        return data

    def _scalar(self, code: str) -> Any:
        return struct.unpack(f"<{code}", self._take(struct.calcsize(f"<{code}")))[0]

    def _believed(self, count: int, least_bytes: int) -> int:
        """Return a count, if there are bytes for so many things of at least so many bytes."""
        if count * least_bytes > self._left:
            refuse(self._path, f"its header counts {count} things, and has no bytes for them")
        return count

    def _string(self) -> str:
        return self._strings(1)[0]

    def _strings(self, count: int) -> list[str]:
        """Read texts. Tokens and merges are most of a header: little is done for each of them."""
        read, left, texts = self._file.read, self._left, []
        number, size = int.from_bytes, 8
        try:
            for _ in range(count):
                length = number(read(size), "little")
                left -= size + length
                if left < 0:
                    self._take(self._left + 1)  # refuses
                texts.append(read(length).decode())
        except UnicodeDecodeError as error:
            refuse(self._path, f"{error.object[:_MAX_SHOWN]!a} is not UTF-8")
        self._left = left
        return texts

    def _value(self, kind: int, key: str) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            return self._array(key)
        return self._scalar(self._code(kind, key))

    def _array(self, key: str) -> list[Any]:
        kind, count = self._scalar("I"), self._scalar("Q")
        if count > self._items_left:
            refuse(self._path, f"{shown(key)} has {count} items, which are too many")
        self._items_left -= count
        if kind == _STRING:
            return self._strings(self._believed(count, 8))
        code = self._code(kind, key)
        data = self._take(self._believed(count, 1) * struct.calcsize(f"<{code}"))
        return list(struct.unpack(f"<{count}{code}", data))

    def _code(self, kind: int, key: str) -> str:
        if kind not in _SCALARS:
            refuse(self._path, f"{shown(key)} is of a kind that is not known ({kind})")
        return _SCALARS[kind]

    def _tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        """Return name, shape, type and offset behind the header."""
        name, dims = self._string(), self._scalar("I")
        if dims > _MAX_DIMS:
            refuse(self._path, f"tensor {shown(name)} has {dims} dimensions")
        shape = struct.unpack(f"<{dims}Q", self._take(8 * dims))[::-1]
        return name, shape, self._scalar("I"), self._scalar("Q")

    def _places(
        self, metadata: dict[str, Any], described: list[tuple[str, tuple[int, ...], int, int]]
    ) -> dict[str, TensorPlace]:
        alignment = metadata.get("general.alignment", 32)
        if type(alignment) is not int or not 0 < alignment <= _MAX_ALIGNMENT:
            refuse(self._path, f"general.alignment is {shown(str(alignment))}")
        start = -(-self._file.tell() // alignment) * alignment
        tensors: dict[str, TensorPlace] = {}
        for name, shape, kind, offset in described:
            if name in tensors:
                refuse(self._path, f"tensor {shown(name)} stands in it twice")
            tensors[name] = self._place(name, shape, kind, start + offset)
        at, before = start, ""
        for name, place in sorted(tensors.items(), key=lambda item: item[1].begin):
            if place.begin < at:
                refuse(self._path, f"tensors {shown(before)} and {shown(name)} overlap")
            at, before = place.begin + place.nbytes, name
        return tensors

    def _place(self, name: str, shape: tuple[int, ...], kind: int, begin: int) -> TensorPlace:
        if kind not in BLOCK_TYPES:
            called = _OTHER_TYPES.get(kind, kind)
            served = ", ".join(each.name for each in BLOCK_TYPES.values())
            refuse(
                self._path,
                f"tensor {shown(name)} is of type {called}, which is not supported; "
                f"supported: {served}",
            )
        of, elements = BLOCK_TYPES[kind], math.prod(shape)
        if not shape or elements > _MAX_ELEMENTS:
            refuse(self._path, f"tensor {shown(name)} has an impossible size")
        if shape[-1] % of.elements:
            refuse(self._path, f"tensor {shown(name)} has rows that are no whole {of.name} blocks")
        nbytes = elements // of.elements * of.nbytes
        if begin + nbytes > self._size:
            what = f"tensor {shown(name)} ends at byte {begin + nbytes} of {self._size}"
            refuse(self._path, f"{what}: the file is cut off")
        return TensorPlace(self._path, of, shape, begin, nbytes)


def refuse(path: Path, why: str) -> NoReturn:
    """Raise InvalidRequest that names the file."""
    raise InvalidRequest(f"cannot read {path}: {why}", param="model")


def shown(name: str) -> str:
    """Return a name of the file's, safe for a message."""
    return name if name.isprintable() and len(name) <= _MAX_SHOWN else ascii(name[:_MAX_SHOWN])
