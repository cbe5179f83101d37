"""One request of the load generator: its stream, and the wait for a server that is not ready."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

import aiohttp
from surestep_common.errors import InvalidRequest, Unavailable

from surestep_cli.api.responses import DONE, model_card, payload_of
from surestep_cli.api.sessions import post

_POLL_S = 0.2
_UNREADY = ("http 503", "ClientConnectorError", "ServerDisconnectedError", "ClientOSError")


@dataclass(slots=True)
class Trace:
    """The stream of one request."""

    sent: float
    ended: float = 0.0
    arrivals: list[float] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    usage: dict[str, int] = field(default_factory=dict)
    done: bool = False  # by [DONE], or by a finish reason where a server has no [DONE]
    error: str | None = None
    error_detail: str = ""
    reconnects: int = 0

    @property
    def num_tokens(self) -> int:
        """As the server counts them; a chunk each where it does not say."""
        return self.usage.get("completion_tokens", len(self.arrivals))

    def feed(self, line: bytes) -> None:
        """Parse one line of the stream. Raise ValueError when it is malformed."""
        payload = payload_of(line)
        if payload is None:
            return
        if payload == DONE:
            self.done = True
            return
        now = time.perf_counter()
        chunk = json.loads(payload)
        if chunk.get("error") is not None:
            self.fail("error in the stream", json.dumps(chunk["error"]))
            return
        self.usage = chunk.get("usage") or self.usage
        choices = chunk.get("choices", ())
        self.done |= any(c.get("finish_reason") for c in choices)
        output = [c for c in choices if c.get("text") or c.get("token_ids")]
        if output:
            self.arrivals.append(now)
            self.texts += [c.get("text") or "" for c in output]

    def fail(self, kind: str, detail: str = "") -> None:
        """Record a failure; the first one counts."""
        if self.error is None:
            self.error, self.error_detail = kind, detail[:500]


async def request(session: aiohttp.ClientSession, body: Mapping[str, Any], at_least: int) -> Trace:
    """Send one request and read its stream to the end; a failure is recorded, not raised.

    Fewer than `at_least` tokens are a failure.
    """
    trace = Trace(sent=time.perf_counter())
    try:
        response, trace.reconnects = await post(session, "v1/completions", body)
        async with response:
            if response.status == HTTPStatus.OK:
                async for line in response.content:
                    trace.feed(line)
            else:
                trace.fail(f"http {response.status}", await response.text())
    except TimeoutError:
        trace.fail("timeout")
    except (aiohttp.ClientError, ValueError) as error:
        trace.fail(type(error).__name__, str(error))
    trace.ended = time.perf_counter()
    if not trace.done:
        trace.fail("stream ended without [DONE]")
    elif trace.num_tokens < at_least:
        trace.fail("fewer tokens than asked for", f"{trace.num_tokens} of {at_least}")
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
