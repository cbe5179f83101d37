"""Answers as server-sent events."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import Any, Protocol

from starlette.responses import Response
from starlette.types import Receive, Scope, Send
from surestep_common.errors import Cancelled, SurestepError

from surestep_gateway.context import Gateway
from surestep_gateway.http.admission import Admission
from surestep_gateway.observability.answer_metrics import Ending
from surestep_gateway.output.json_pieces import JsonPieces, send_pieces
from surestep_gateway.output.json_text import json_text
from surestep_gateway.output.sequence import Delta, OutputSequence, run_sequences
from surestep_gateway.stored.running import Interrupted

from .generation import Generation
from .respond import AnswerSize, accounted, run_whole, until_disconnect

logger = logging.getLogger(__name__)

_GRACE_S = 2.0  # after the deadline of a request, for the client to read the error
_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would hold the events back
]

Pieces = list[bytes | bytearray]


class StreamFormat(Protocol):
    """The events of one API's streams."""

    async def opening(self, sequence: OutputSequence) -> Pieces:
        """Return what goes before the first delta of a sequence."""

    def delta(self, sequence: OutputSequence, delta: Delta) -> bytes:
        """Return the events of one delta; nothing if there are none."""

    async def end(self) -> bytes:
        """Return what goes behind the last delta of all."""

    async def failure(self, error: Exception) -> bytes:
        """Return the events that end a stream that has failed."""


class Answer(StreamFormat, Protocol):
    """The answer of one sequence, streamed or whole; `delta` takes it in, either way."""

    async def whole(self) -> bytes:
        """Return the JSON of the answer, which is over."""


async def respond(
    gateway: Gateway,
    generation: Generation,
    answer: Answer,
    receive: Receive,
    within: contextlib.AbstractContextManager[None] | None = None,
) -> Response:
    """Run a generation within a context and respond as it asks, streamed or whole.

    Raise SurestepError.
    """
    if generation.body.stream:
        return EventStream(generation, answer, gateway.admission, within)
    size = AnswerSize(gateway)

    async def emit(sequence: OutputSequence, delta: Delta) -> None:
        size.grow(len(answer.delta(sequence, delta)))

    try:
        whole = await run_whole(generation, emit, answer.whole, receive, gateway, within)
    except Interrupted:
        whole = await answer.whole()
    return JsonPieces([whole], gateway.answers)


class EventStream(Response):
    """Server-sent events. The status is sent with the first token, so early errors keep theirs."""

    def __init__(
        self,
        generation: Generation,
        events: StreamFormat,
        admission: Admission,
        within: contextlib.AbstractContextManager[None] | None = None,
    ) -> None:
        """The generation runs in the context of `within`, which may raise an error of its own."""
        super().__init__()
        self._generation = generation
        self._events = events
        self._admission = admission
        self._within = within or contextlib.nullcontext()
        self._opened: set[int] = set()
        self._one_event = asyncio.Lock()  # at a time
        self._send: Send
        self._ending: Ending

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._send, self._ending = send, scope["state"]["ending"]
        try:
            async with asyncio.timeout_at(self._generation.deadline + _GRACE_S):
                await self._run(receive)
        except TimeoutError:  # the error is sent, but the client reads nothing any more
            scope["state"]["abort"]()

    async def _run(self, receive: Receive) -> None:
        generation = self._generation
        run = run_sequences(generation.sequences, self._emit, generation.max_open)
        try:
            async with accounted(generation):
                with self._within:
                    await until_disconnect(receive, run, self._admission)
        except Exception as error:
            if not isinstance(error, Interrupted):  # which the client has asked for
                self._ending.fail(error)
            if isinstance(error, Cancelled) and not isinstance(error, Interrupted):
                return  # the client is gone
            if not self._opened:
                raise
            if not isinstance(error, SurestepError):
                logger.exception("a stream failed")
            await self._finish(await self._events.failure(error))
            return
        await self._finish(await self._events.end())

    async def _emit(self, sequence: OutputSequence, delta: Delta) -> None:
        async with self._one_event:
            if sequence.index not in self._opened:
                await self._open(sequence)
            data = self._events.delta(sequence, delta)
            if data:
                await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def _open(self, sequence: OutputSequence) -> None:
        """Send the status with the first token of all, and the sequence's opening events."""
        pieces = await self._events.opening(sequence)
        if not self._opened:
            start = {"type": "http.response.start", "status": 200, "headers": _HEADERS}
            await self._send(start)
            self._ending.streamed = True
        self._opened.add(sequence.index)
        await send_pieces(self._send, pieces, more_body=True)

    async def _finish(self, data: bytes) -> None:
        await self._send({"type": "http.response.body", "body": data, "more_body": False})


def event(content: dict[str, Any]) -> bytes:
    """Return an event without a name."""
    return b"data: " + json_text(content) + b"\n\n"


def named_event(content: dict[str, Any]) -> bytes:
    """Return an event whose name is its type."""
    kind: str = content["type"]
    return b"event: " + kind.encode() + b"\n" + event(content)
