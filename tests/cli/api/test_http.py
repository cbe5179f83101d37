"""Answers that are none: real sockets, and TLS with certificates made here."""

from __future__ import annotations

import asyncio
import io
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import trustme
from support.processes.ports import free_port
from surestep_cli.api.http import call
from surestep_cli.main import run

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


@pytest.mark.parametrize(
    "words",
    [
        ["status"],
        ["top", "--updates", "1"],
        ["chat", "hello"],
        ["bench", "--num-requests", "1"],
        ["restart-workers", "--admin-api-key", "k"],
    ],
    ids=lambda words: str(words[0]),
)
@pytest.mark.parametrize(
    "address", ["http://127.0.0.1:{}", "127.0.0.1:{}", "unix://%2Fnowhere%2F{}"]
)
def test_no_server_is_told_with_what_to_do(
    words: list[str],
    address: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO())
    url = address.format(free_port())
    assert run([*words, "--url", url]) == 1
    url = url if "://" in url else f"http://{url}"
    told = "start one with `surestep serve`, or name another with --url\n"
    assert capsys.readouterr().err == f"surestep: no server at {url}: {told}"
