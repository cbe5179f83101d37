"""Frames of HTTP/2 as no library would send them, and a socket to send them on."""

from __future__ import annotations

import contextlib
import itertools
import select
import socket
import struct
import time
from collections.abc import Iterator

from surestep_common import addresses

DATA, HEADERS, RST_STREAM, SETTINGS, PING, CONTINUATION = 0, 1, 3, 4, 6, 9
END_STREAM, END_HEADERS = 1, 4
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_READ = 1 << 20


def frame(kind: int, flags: int = 0, stream: int = 0, body: bytes = b"") -> bytes:
    """One frame."""
    return len(body).to_bytes(3, "big") + bytes([kind, flags]) + struct.pack(">I", stream) + body


def head(path: str, *more: tuple[str, str]) -> bytes:
    """The header block of a gRPC call, each field written out."""
    fields = [
        (":method", "POST"),
        (":scheme", "http"),
        (":path", path),
        (":authority", "localhost"),
        ("te", "trailers"),
        ("content-type", "application/grpc"),
        *more,
    ]
    return b"".join(field(name, value) for name, value in fields)


def field(name: str, value: str) -> bytes:
    """A field that no table remembers."""
    return b"\x00" + _text(name) + _text(value)


def _text(text: str) -> bytes:
    assert len(text) < 127 + 128
    length = bytes([len(text)]) if len(text) < 127 else bytes([127, len(text) - 127])
    return length + text.encode()


def stream_ids() -> Iterator[int]:
    """Those of a client, in order."""
    return itertools.count(1, 2)


@contextlib.contextmanager
def connection(address: str) -> Iterator[socket.socket]:
    """A connection to a gRPC address, behind its preface."""
    host, port = addresses.split(address)
    unix = address.startswith(addresses.UNIX)
    with socket.socket(socket.AF_UNIX if unix else socket.AF_INET) as end:
        end.connect(host if unix else (host, port))
        end.sendall(_PREFACE + frame(SETTINGS))
        yield end


def send(end: socket.socket, data: bytes, timeout_s: float) -> bool:
    """Send all of it and read what comes meanwhile; False if the server closes or takes no more."""
    deadline, rest = time.monotonic() + timeout_s, memoryview(data)
    end.setblocking(False)
    with contextlib.suppress(ConnectionError):
        while rest and time.monotonic() < deadline:
            readable, writable, _ = select.select([end], [end], [], 0.5)
            if readable and not end.recv(_READ):
                return False
            if writable:
                rest = rest[end.send(rest) :]
        return not rest
    return False


def frames(end: socket.socket, timeout_s: float) -> Iterator[tuple[int, int, bytes]]:
    """Kind, stream and body of the frames that come, until none does for so long."""
    end.settimeout(timeout_s)
    with contextlib.suppress(TimeoutError), end.makefile("rb") as file:
        while len(about := file.read(9)) == 9:
            body = file.read(int.from_bytes(about[:3], "big"))
            yield about[3], struct.unpack(">I", about[5:])[0], body
