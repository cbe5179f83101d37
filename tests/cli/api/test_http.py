"""Answers that are none: real sockets, and TLS with certificates made here."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import trustme
from surestep_cli.api.http import call

HEAD = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nconnection: close\r\n\r\n"


@asynccontextmanager
async def server(answer: bytes, tls: ssl.SSLContext | None = None) -> AsyncIterator[str]:
    """Sends these bytes to whoever asks, and closes. Gives host:port."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        writer.write(answer)
        writer.close()

    listening = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=tls)
    async with listening:
        port = listening.sockets[0].getsockname()[1]
        yield f"127.0.0.1:{port}"


@pytest.mark.parametrize("answer", [HEAD + b"{", b"SSH-2.0-OpenSSH_9.6\r\n", b""])
async def test_what_is_no_answer_is_an_os_error(answer: bytes) -> None:
    async with server(answer) as address:
        with pytest.raises(OSError):  # noqa: PT011  # of any kind
            await asyncio.to_thread(call, f"http://{address}/health")


async def test_a_stranger_with_a_certificate_is_an_os_error() -> None:
    issued = trustme.CA().issue_cert("example.com")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    issued.configure_cert(context)
    async with server(HEAD + b"{}", context) as address:
        with pytest.raises(OSError, match="CERTIFICATE_VERIFY_FAILED"):
            await asyncio.to_thread(call, f"https://{address}/health")
