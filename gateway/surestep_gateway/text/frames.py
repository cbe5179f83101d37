"""Several byte strings in one: what a request's body needs beside it while it is prepared."""

from __future__ import annotations

import struct
from collections.abc import Sequence

_SIZE = struct.Struct("<Q")


def framed(parts: Sequence[bytes | bytearray]) -> bytearray:
    """Return the parts, each behind its size."""
    whole = bytearray()
    for part in parts:
        whole += _SIZE.pack(len(part))
        whole += part
    return whole


def unframed(whole: bytes | bytearray) -> list[bytes | bytearray]:
    """Return the parts again."""
    parts, at = [], 0
    while at < len(whole):
        (size,) = _SIZE.unpack_from(whole, at)
        at += _SIZE.size
        parts.append(whole[at : at + size])
        at += size
    return parts
