"""The format between the gateway and its text processes: frames of byte strings.

A reply costs the gateway's event loop next to nothing: ids are packed as the protocol packs them,
and of the body only what is needed after its prompts are made comes back.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable, Sequence
from typing import BinaryIO

import orjson
from surestep_common import errors
from surestep_common.errors import InternalError, SurestepError

Parts = Sequence[bytes | bytearray]

CHECKING = b"checking"  # a frame ahead of the answer; behind it the field, or nothing: it is done
_COUNT, _SIZE = struct.Struct("<I"), struct.Struct("<Q")
_WRITE_BYTES = 256 << 10  # at a time


def _head(parts: Parts) -> bytes:
    return _COUNT.pack(len(parts)) + struct.pack(f"<{len(parts)}Q", *map(len, parts))


def write(stream: BinaryIO, parts: Parts) -> None:
    """Send a frame, blocking."""
    stream.write(_head(parts))
    for part in parts:
        stream.write(part)
    stream.flush()


def read(stream: BinaryIO) -> list[bytes] | None:
    """Return the next frame, blocking; None at the end."""
    head = stream.read(_COUNT.size)
    if len(head) < _COUNT.size:
        return None
    (count,) = _COUNT.unpack(head)
    sizes = struct.unpack(f"<{count}Q", stream.read(8 * count))
    return [stream.read(size) for size in sizes]


async def send(stream: asyncio.StreamWriter, parts: Parts) -> None:
    """Send a frame, piece by piece. Raise ConnectionError."""
    _write(stream, _head(parts))
    for part in parts:
        view = memoryview(part)
        for at in range(0, len(view), _WRITE_BYTES):
            _write(stream, view[at : at + _WRITE_BYTES])
            await stream.drain()


def _write(stream: asyncio.StreamWriter, data: bytes | memoryview) -> None:
    if stream.is_closing():  # uvloop has a RuntimeError for that
        raise ConnectionResetError
    stream.write(data)


async def receive(stream: asyncio.StreamReader) -> list[bytes]:
    """Return the next frame. Raise asyncio.IncompleteReadError."""
    (count,) = _COUNT.unpack(await stream.readexactly(_COUNT.size))
    sizes = struct.unpack(f"<{count}Q", await stream.readexactly(8 * count))
    return [await stream.readexactly(size) for size in sizes]


def dump_error(error: SurestepError) -> bytes:
    """Serialise an expected error."""
    return orjson.dumps(
        {
            "kind": type(error).__name__,
            "message": error.message,
            "param": error.param,
        }
    )


def load_error(data: bytes) -> SurestepError:
    about = orjson.loads(data)
    kind: Callable[..., SurestepError] = getattr(errors, about["kind"], InternalError)
    return kind(about["message"], param=about["param"])


def framed(parts: Sequence[bytes | bytearray]) -> bytearray:
    """Return the parts in one, each behind its size."""
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
