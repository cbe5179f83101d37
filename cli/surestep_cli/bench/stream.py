"""Request of the load generator: its stream, and the wait for a server that is not ready."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

import aiohttp
from surestep_common.errors import InvalidRequest, Unavailable

from surestep_cli.api.http import model_card
from surestep_cli.api.sessions import stream
from surestep_cli.api.stream import UNFINISHED, StreamEnded

_POLL_S = 0.2
_UNREADY = ("HTTP 503", "ClientConnectorError", "ServerDisconnectedError", "ClientOSError")


@dataclass(slots=True)
class Trace:
    """The stream of one request."""

    sent: float
    ended: float = 0.0
    arrivals: list[float] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    usage: dict[str, int] = field(default_factory=dict)
    finished: bool = False  # by a finish reason: some servers have no [DONE]
    error: str | None = None
    error_detail: str = ""
    reconnects: int = 0

    @property
    def num_tokens(self) -> int:
        """Number of tokens as the server counts them; a chunk each where it does not say."""
        return self.usage.get("completion_tokens", len(self.arrivals))

    def take(self, chunk: Mapping[str, Any]) -> None:
        """Add an event of the stream."""
        now = time.perf_counter()
        self.usage = chunk.get("usage") or self.usage
        choices = chunk.get("choices", ())
        self.finished |= any(c.get("finish_reason") for c in choices)
        texts = [c.get("text") or c.get("delta", {}).get("content") or "" for c in choices]
        if any(texts) or any(c.get("token_ids") for c in choices):
            self.arrivals.append(now)
            self.texts += texts

    def count_reconnect(self) -> None:
        self.reconnects += 1


async def request(
    session: aiohttp.ClientSession,
    body: Mapping[str, Any],
    at_least: int,
    path: str = "v1/completions",
) -> Trace:
    """Send one request and read its stream to the end; a failure is recorded, not raised.

    Fewer than `at_least` tokens are a failure.
    """
    trace = Trace(sent=time.perf_counter())
    try:
        await stream(session, path, body, trace.take, trace.count_reconnect)
    except StreamEnded as end:
        if end.kind != UNFINISHED or not trace.finished:
            trace.error, trace.error_detail = end.kind, end.detail[:500]
    trace.ended = time.perf_counter()
    if trace.error is None and trace.num_tokens < at_least:
        trace.error = "fewer tokens than asked for"
        trace.error_detail = f"{trace.num_tokens} of {at_least}"
    return trace


async def served_model(
    session: aiohttp.ClientSession, model: str | None, ready_timeout_s: float
) -> str:
    """`model`, or the name of the server's first one.

    With a `ready_timeout_s` that is not 0 the server has completed a request for one token, for
    which it is waited that long while it refuses connections, has no model or answers 503.
    Raise aiohttp.ClientError, InvalidRequest without a model, Unavailable.
    """
    deadline = time.monotonic() + ready_timeout_s
    while True:
        unready: Exception
        try:
            served = model or await _first_model(session)
            if not ready_timeout_s:
                return served
            trace = await request(session, one_token(served), 0)
            if trace.error not in _UNREADY:
                return served
            unready = Unavailable(f"not ready: {trace.error}: {trace.error_detail}")
        except aiohttp.ClientResponseError as error:
            if error.status != HTTPStatus.SERVICE_UNAVAILABLE:
                raise
            unready = error
        except (aiohttp.ClientConnectionError, InvalidRequest) as error:
            unready = error
        if time.monotonic() >= deadline:
            raise unready
        await asyncio.sleep(_POLL_S)


def one_token(model: str) -> dict[str, Any]:
    """Body of the shortest request there is."""
    return {"model": model, "prompt": "a", "max_tokens": 1, "stream": True}


async def _first_model(session: aiohttp.ClientSession) -> str:
    async with session.get("v1/models", raise_for_status=True) as response:
        return str(model_card(await response.json())["id"])
