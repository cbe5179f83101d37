"""Clients that are slow, silent or rude, on raw sockets: each takes a connection for nothing."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import Awaitable, Callable

Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]
Address = tuple[str, int]
PACE_S = 0.3


async def connect(address: Address, *, receive_bytes: int | None = None) -> Stream:
    """A raw connection; a small `receive_bytes` makes a client that takes little at a time."""
    raw = socket.socket()
    raw.setblocking(False)
    if receive_bytes is not None:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    await asyncio.get_running_loop().sock_connect(raw, address)
    return await asyncio.open_connection(sock=raw, limit=receive_bytes or 1 << 16)


def stop_reading(stream: Stream) -> None:
    """Leave whatever comes in the buffers of the system."""
    stream[1].transport.pause_reading()  # type: ignore[attr-defined]


def post(path: str, body: bytes, *headers: bytes) -> bytes:
    """A whole request."""
    lines = (b"POST %s HTTP/1.1" % path.encode(), b"host: 127.0.0.1", *JSON, *headers)
    return b"\r\n".join((*lines, b"content-length: %d" % len(body), b"", body))


JSON = (b"content-type: application/json",)
OPEN_BODY = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"


async def silent(stream: Stream) -> None:
    """Says nothing."""


async def head_in_drops(stream: Stream) -> None:
    """Sends its head byte by byte."""
    await drip(stream, b"GET /health HTTP/1.1\r\nhost: x\r\nx: " + b"y" * 10_000)


async def newlines(stream: Stream) -> None:
    """Sends what is no head and yet no error."""
    await drip(stream, b"\r\n" * 10_000)


async def body_never(stream: Stream) -> None:
    """Announces a body and leaves it at that."""
    stream[1].write(OPEN_BODY + b"content-length: 1000\r\n\r\n")


async def body_in_drops(stream: Stream) -> None:
    """Sends its body byte by byte."""
    stream[1].write(OPEN_BODY + b"content-length: 10000\r\n\r\n")
    await drip(stream, b" " * 10_000)


async def chunks_in_drops(stream: Stream) -> None:
    """The same in chunks of one byte."""
    stream[1].write(OPEN_BODY + b"transfer-encoding: chunked\r\n\r\n")
    await drip(stream, b"1\r\n \r\n" * 10_000, size=6)


async def half_a_body(stream: Stream) -> None:
    """Sends a good part of a large body, and stops."""
    stream[1].write(OPEN_BODY + b"content-length: 1000000\r\n\r\n" + b" " * 200_000)


async def continues(stream: Stream) -> None:
    """Waits to be told that it may send its body, and does not send it."""
    stream[1].write(OPEN_BODY + b"content-length: 100\r\nexpect: 100-continue\r\n\r\n")


async def idle(stream: Stream) -> None:
    """Keeps its connection after a good request."""
    stream[1].write(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")


async def never_reads(stream: Stream) -> None:
    """Asks for a long stream and takes none of it."""
    stop_reading(stream)
    body = {"prompt": "x", "max_tokens": 200, "stream": True, "logprobs": 2}
    stream[1].write(post("/v1/completions", json.dumps(body).encode()))


async def never_reads_pipelined(stream: Stream) -> None:
    """Asks again and again and takes no answer."""
    stop_reading(stream)
    stream[1].write(b"GET /metrics HTTP/1.1\r\nhost: x\r\n\r\n" * 50)


async def drip(stream: Stream, data: bytes, size: int = 1) -> None:
    """Send a little, wait, and so on."""
    for at in range(0, len(data), size):
        stream[1].write(data[at : at + size])
        await stream[1].drain()
        await asyncio.sleep(PACE_S)


Kind = Callable[[Stream], Awaitable[None]]
READERS: tuple[Kind, ...] = (
    *(silent, head_in_drops, newlines, body_never, body_in_drops, chunks_in_drops),
    *(half_a_body, continues, idle),
)
OTHERS: tuple[Kind, ...] = (never_reads, never_reads_pipelined)


async def be(kind: Kind, address: Address) -> str:
    """Be such a client until the server ends the connection; the first line of what it said.

    A client that does not read does not hear of the end: it has to be cancelled.
    """
    reader, writer = stream = await connect(address, receive_bytes=4096 if kind in OTHERS else None)
    with contextlib.closing(writer):
        async with asyncio.TaskGroup() as group:
            sending = group.create_task(quiet(kind(stream)))
            answer = await everything(reader)
            sending.cancel()
    return answer.partition(b"\r\n")[0].decode()


async def everything(reader: asyncio.StreamReader) -> bytes:
    """Return the server's words until it ends the connection."""
    data = b""
    with contextlib.suppress(OSError):
        while piece := await reader.read(1 << 16):
            data += piece
    return data


async def quiet(sending: Awaitable[None]) -> None:
    """Send until the server has had enough."""
    with contextlib.suppress(OSError):
        await sending
