"""Content of a block or a snapshot under its key, as bytes that say themselves what they are.

An entry is of use only to ranks that would compute the same bytes: those with its identity. What
has another identity, another version of the form, another key, or other bytes than were written is
refused by name.
"""

from __future__ import annotations

import hashlib
import struct
import zlib
from enum import IntEnum
from typing import NamedTuple, Self

from torch import Tensor

VERSION = 1  # of the form
IDENTITY_BYTES = 32
_MAGIC = b"surestep-kv\0"
_SEAL_BYTES = 16
# Magic, version, identity, key and its length, kind, padding, tokens, then length and two checksums
# of what follows; then a hash of all that.
_HEAD = struct.Struct("<12sI32s20sBB2xQQII")
HEAD_BYTES = _HEAD.size + _SEAL_BYTES


class Kind(IntEnum):
    """Kinds of entries."""

    BLOCK = 1  # without rows of the drafter
    DRAFTED = 2  # a block with them
    SNAPSHOT = 3


class Name(NamedTuple):
    """Name of an entry among those of its identity."""

    kind: Kind
    key: bytes  # at most 20 bytes

    def __str__(self) -> str:
        return f"{self.key.hex()}.{self.kind.name.lower()}"


class Entry(NamedTuple):
    """Entry as it is stored."""

    head: bytes
    payload: Tensor  # u8[N], contiguous, on the CPU
    tokens: int = 0  # of the prefix, of a snapshot

    @property
    def nbytes(self) -> int:
        return len(self.head) + len(self.payload)

    @property
    def parts(self) -> tuple[bytes, memoryview]:
        """Return head and content, which follow each other where it is stored."""
        return self.head, bytes_of(self.payload)


class Refused(Exception):
    """An entry that is not what was asked for."""


class EntryForm(NamedTuple):
    """Form of the entries of one identity."""

    identity: bytes

    @classmethod
    def of(cls, about: str) -> Self:
        """Make the form of ranks of which all this is true."""
        return cls(hashlib.blake2b(about.encode(), digest_size=IDENTITY_BYTES).digest())

    def pack(self, name: Name, payload: Tensor, tokens: int = 0) -> Entry:
        """Return an entry with this content."""
        key = name.key
        facts = _MAGIC, VERSION, self.identity, key, len(key), name.kind, tokens
        head = _HEAD.pack(*facts, len(payload), *_checksums(payload))
        return Entry(head + _seal(head), payload, tokens)

    def unpack(self, name: Name, data: Tensor, nbytes: int) -> Entry:
        """Return the entry that `data` u8[N] is, of `nbytes` of content. Raises Refused."""
        head = bytes(bytes_of(data[:HEAD_BYTES]))
        return self.checked(name, Entry(head, data[HEAD_BYTES:]), nbytes)

    def checked(self, name: Name, entry: Entry, nbytes: int) -> Entry:
        """Return an entry if it is this one, of `nbytes` of content, and whole. Raises Refused."""
        head, payload, _ = entry
        if len(head) < HEAD_BYTES or not head.startswith(_MAGIC):
            raise Refused("it is no entry of a cache")
        _, version, identity, key, size, kind, tokens, length, *sums = _HEAD.unpack_from(head)
        if version != VERSION:
            raise Refused(f"its form has version {version}, not {VERSION}")
        if head[_HEAD.size :] != _seal(head[: _HEAD.size]):
            raise Refused("its head is corrupted")
        if identity != self.identity:
            raise Refused("it is of another model, or was computed in another way")
        if (kind, key[:size]) != (name.kind, name.key):
            raise Refused("it is of another prefix")
        if length != nbytes or len(payload) != nbytes:
            raise Refused(f"it has {len(payload)} bytes, not {nbytes}")
        if sums != list(_checksums(payload)):
            raise Refused("its content is corrupted")
        return Entry(head, payload, tokens)


def bytes_of(payload: Tensor) -> memoryview:
    """Return the same memory."""
    return payload.numpy().data


def _checksums(payload: Tensor) -> tuple[int, int]:
    """Return two of different kinds, computed beside other threads."""
    content = bytes_of(payload)
    return zlib.crc32(content), zlib.adler32(content)


def _seal(head: bytes) -> bytes:
    return hashlib.blake2b(head, digest_size=_SEAL_BYTES).digest()
