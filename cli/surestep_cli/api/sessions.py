"""Sessions of the asynchronous HTTP client with a server, over TCP or a Unix socket."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
from pydantic import SecretStr
from surestep_common.errors import Unavailable
from surestep_common.tls import context_of_client

from .http import api_root, message_in, no_answer, unix_socket
from .stream import EventReader, StreamEnded

_MAX_LINE_BYTES = 1 << 20  # a chunk with many logprobs passes aiohttp's 64 KiB


def open_session(
    url: str,
    *,
    api_key: SecretStr | None = None,
    timeout: aiohttp.ClientTimeout,
    certificate: Path | None = None,
) -> aiohttp.ClientSession:
    """Open a session for concurrent requests to paths below `url`; `certificate` as for `call`."""
    socket = unix_socket(url)
    tls = context_of_client(certificate) if certificate is not None else True
    return aiohttp.ClientSession(
        base_url=f"{api_root(url)}/" if socket is None else "http://localhost/",
        headers={"Authorization": f"Bearer {api_key.get_secret_value()}"} if api_key else {},
        timeout=timeout,
        connector=aiohttp.TCPConnector(limit=0, ssl=tls)
        if socket is None
        else aiohttp.UnixConnector(socket, limit=0),
        read_bufsize=_MAX_LINE_BYTES,
        trace_configs=[_noting_reuse()],
    )


async def stream(
    session: aiohttp.ClientSession,
    path: str,
    body: Mapping[str, Any],
    take: Callable[[dict[str, Any]], object],
    sent_anew: Callable[[], object] = lambda: None,
) -> None:
    """POST a request and hand each event of its stream to `take`. Raise StreamEnded."""
    reader = EventReader()
    try:
        async with await post(session, path, body, sent_anew) as response:
            if response.status != HTTPStatus.OK:
                raise StreamEnded.refused(response.status, await response.text())
            async for line in response.content:
                if (event := reader.feed(line)) is not None:
                    take(event)
    except (aiohttp.ClientError, TimeoutError, ValueError) as error:
        raise StreamEnded.because(error) from error
    reader.end()


async def post(
    session: aiohttp.ClientSession,
    path: str,
    body: Mapping[str, Any],
    sent_anew: Callable[[], object] = lambda: None,
) -> aiohttp.ClientResponse:
    """POST `body` as JSON, once more where a connection was closed that had been kept alive.

    A server may close a connection that it kept alive just as a request comes (RFC 9112, 9.3.1),
    and llama.cpp's does so after every stream without a word; aiohttp repeats only methods that are
    idempotent. What breaks on a connection of its own, or after the response began, is raised.
    """
    while True:
        connection = _Connection()
        try:
            return await session.post(path, json=body, trace_request_ctx=connection)
        except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError):
            if not connection.reused:
                raise
            sent_anew()


async def post_json(session: aiohttp.ClientSession, path: str, body: Mapping[str, Any]) -> Any:
    """Return the JSON of a POST. Raise Unavailable."""
    text = await _text(session.post(path, json=body), path)
    try:
        return json.loads(text)
    except ValueError as error:
        raise _unanswered(path, error) from error


async def get_json(session: aiohttp.ClientSession, path: str) -> Any:
    """Return the JSON of a GET. Raise Unavailable."""
    text = await get_text(session, path)
    try:
        return json.loads(text)
    except ValueError as error:
        raise Unavailable(f"/{path} is no JSON: {error}") from error


async def get_text(session: aiohttp.ClientSession, path: str) -> str:
    """Return the body of a GET. Raise Unavailable."""
    return await _text(session.get(path), path)


async def _text(asked: AbstractAsyncContextManager[aiohttp.ClientResponse], path: str) -> str:
    try:
        async with asked as response:
            text = await response.text()
    except (aiohttp.ClientError, TimeoutError) as error:
        raise _unanswered(path, error) from error
    if response.status != HTTPStatus.OK:
        why = message_in(text)
        raise Unavailable(f"/{path} was answered with HTTP {response.status}: {why}")
    return text


def _unanswered(path: str, error: Exception) -> Unavailable:
    if isinstance(error, aiohttp.ClientConnectorError):
        return no_answer(f"{error.host}:{error.port}", error)
    return Unavailable(f"no answer to /{path}: {error or 'too late'}")


@dataclass(slots=True)
class _Connection:
    reused: bool = False  # it has carried another request before


def _noting_reuse() -> aiohttp.TraceConfig:
    async def note(_session: object, context: SimpleNamespace, _params: object) -> None:
        if context.trace_request_ctx is not None:
            context.trace_request_ctx.reused = True

    config = aiohttp.TraceConfig()
    config.on_connection_reuseconn.append(note)
    return config
