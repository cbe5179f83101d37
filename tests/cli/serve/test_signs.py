"""What counts as a sign of life of a gateway: real sockets, and TLS with certificates made here."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import trustme
from support.processes.ports import free_address
from surestep_cli.api.http import call
from surestep_cli.serve.liveness import HttpProbe
from surestep_common.notify import ALIVE, Listener

HEAD = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nconnection: close\r\n\r\n"


@asynccontextmanager
async def server(answer: bytes | None, tls: ssl.SSLContext | None = None) -> AsyncIterator[str]:
    """Sends these bytes to whoever asks, and closes; None: says nothing. Gives host:port."""
    over = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if answer is None:
            await over.wait()
        else:
            await reader.readline()
            writer.write(answer)
        writer.close()

    listening = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=tls)
    async with listening:
        port = listening.sockets[0].getsockname()[1]
        yield f"127.0.0.1:{port}"
        over.set()


@pytest.mark.parametrize(
    "answer",
    [
        HEAD + b"{}",
        HEAD.replace(b"200 OK", b"500 Internal Server Error") + b"{}",
        HEAD + b"{",  # it ends meanwhile
        HEAD.replace(b"200 OK", b"503 Unavailable") + b"{",
        b"SSH-2.0-OpenSSH_9.6\r\n",  # its port is somebody else's by now
        b"",  # there are too many connections
    ],
)
async def test_whatever_is_said_is_a_sign(answer: bytes) -> None:
    async with server(answer) as address:
        assert await HttpProbe(f"http://{address}/health").seen()


async def test_beats_are_signs_where_the_question_waits() -> None:
    """As behind a flood of connections."""
    beats = Listener()
    async with server(None) as address:
        probe = HttpProbe(f"http://{address}/health", beats)
        assert not await probe.seen()
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.sendto(ALIVE.encode(), "\0" + beats.address.removeprefix("@"))
        assert [await probe.seen(), await probe.seen()] == [True, False]
    await probe.close()


@pytest.mark.parametrize("answer", [HEAD + b"{", b"SSH-2.0-OpenSSH_9.6\r\n", b""])
async def test_what_is_no_answer_is_an_os_error(answer: bytes) -> None:
    async with server(answer) as address:
        with pytest.raises(OSError):  # noqa: PT011  # of any kind
            await asyncio.to_thread(call, f"http://{address}/health")


async def test_silence_is_none() -> None:
    assert not await HttpProbe(f"http://{free_address()}/health").seen()
    async with server(None) as address:
        assert not await HttpProbe(f"http://{address}/health").seen()


async def test_a_name_that_is_not_found_is_nobodys_silence() -> None:
    assert await HttpProbe("http://name.invalid:8000/health").seen()


async def test_a_certificate_may_be_any() -> None:
    """Its file may have been renewed or removed since the gateway has read it."""
    issued = trustme.CA().issue_cert("example.com")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    issued.configure_cert(context)
    async with server(HEAD + b"{}", context) as address:
        assert await HttpProbe(f"https://{address}/health").seen()
        with pytest.raises(OSError, match="CERTIFICATE_VERIFY_FAILED"):
            await asyncio.to_thread(call, f"https://{address}/health")


async def test_tls_that_is_refused_is_a_sign() -> None:
    async with server(b"") as address:  # as for a connection too many
        assert await HttpProbe(f"https://{address}/health").seen()
