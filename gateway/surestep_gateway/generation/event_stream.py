"""Running a generation, and answering with server-sent events or with one JSON body."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from typing import Any, Protocol, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send
from surestep_common.errors import Cancelled, InvalidRequest, SurestepError, Unavailable

from surestep_gateway.context import Gateway
from surestep_gateway.generation.generation import Generation
from surestep_gateway.generation.request_records import ending, tell_generation
from surestep_gateway.generation.sequence import (
    Delta,
    Emit,
    OutputSequence,
    first_error,
    run_sequences,
)
from surestep_gateway.http.admission import Admission
from surestep_gateway.http.bodies import JsonPieces, send_pieces
from surestep_gateway.observability.clients import Ending
from surestep_gateway.request.protocol import json_text

logger = logging.getLogger(__name__)

_GRACE_S = 2.0  # after the deadline of a request, for the client to read the error
_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would hold the events back
]

COMMENT = b": ping\n\n"  # which readers of events skip

Pieces = list[bytes | bytearray]


class Interrupted(Cancelled):
    """Another request asked for the end of this one, whose client still waits."""


class StreamFormat(Protocol):
    """The events of one API's streams."""

    @property
    def ping(self) -> bytes:
        """Ping that keeps a silent stream alive, before its opening events too."""

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
        return EventStream(gateway, generation, answer, within)
    size = AnswerSize(gateway)

    async def emit(sequence: OutputSequence, delta: Delta) -> None:
        size.grow(len(answer.delta(sequence, delta)))

    try:
        whole = await run_whole(generation, emit, answer.whole, receive, gateway, within)
    except Interrupted:
        whole = await answer.whole()
    return JsonPieces([whole], gateway.answers, generation.weight_headers)


class EventStream(Response):
    """Server-sent events, with a ping whenever nothing was sent for the keep-alive interval.

    The status is sent with the first token or the first ping, so earlier errors keep theirs.
    """

    def __init__(
        self,
        gateway: Gateway,
        generation: Generation,
        events: StreamFormat,
        within: contextlib.AbstractContextManager[None] | None = None,
    ) -> None:
        """The generation runs in the context of `within`, which may raise an error of its own."""
        super().__init__()
        self._generation = generation
        self._events = events
        self._admission = gateway.admission
        self._interval_s = gateway.settings.sse_keep_alive_interval  # 0: no pings
        self._within = within or contextlib.nullcontext()
        self._begun = False  # the status is sent
        self._opened: set[int] = set()
        self._sent_at = generation.origin.arrived  # when something was, on the same clock
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
        run = self._kept_alive(run_sequences(generation.sequences, self._emit, generation.max_open))
        try:
            with accounted(generation), self._within:
                await until_disconnect(receive, run, self._admission)
        except Exception as error:
            if not isinstance(error, Interrupted):  # which the client has asked for
                self._ending.fail(error)
            if isinstance(error, Cancelled) and not isinstance(error, Interrupted):
                return  # the client is gone
            if not self._begun:
                raise
            if not isinstance(error, SurestepError):
                logger.exception("a stream failed")
            await self._finish(await self._events.failure(error))
            return
        await self._finish(await self._events.end())

    async def _kept_alive(self, work: Coroutine[Any, Any, None]) -> None:
        if not self._interval_s:
            await work
            return
        async with asyncio.TaskGroup() as group:
            pings = group.create_task(self._ping())
            await work
            pings.cancel()

    async def _ping(self) -> None:
        """Send a ping whenever the stream has been silent for the interval, until cancelled."""
        while True:
            await asyncio.sleep(self._sent_at + self._interval_s - time.perf_counter())
            async with self._one_event:
                if time.perf_counter() >= self._sent_at + self._interval_s:
                    await self._begin()
                    await self._write(self._events.ping)

    async def _emit(self, sequence: OutputSequence, delta: Delta) -> None:
        async with self._one_event:
            if sequence.index not in self._opened:
                await self._open(sequence)
            data = self._events.delta(sequence, delta)
            if data:
                await self._write(data)

    async def _open(self, sequence: OutputSequence) -> None:
        """Send the sequence's opening events, behind the status."""
        pieces = await self._events.opening(sequence)
        await self._begin()
        self._opened.add(sequence.index)
        await send_pieces(self._send, pieces, more_body=True)
        self._sent_at = time.perf_counter()

    async def _begin(self) -> None:
        """Send the status unless it is sent."""
        if self._begun:
            return
        told = self._generation.weight_headers.items()
        headers = [*_HEADERS, *((name.encode(), value.encode()) for name, value in told)]
        await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        self._begun = self._ending.streamed = True

    async def _write(self, data: bytes) -> None:
        await self._send({"type": "http.response.body", "body": data, "more_body": True})
        self._sent_at = time.perf_counter()

    async def _finish(self, data: bytes) -> None:
        await self._send({"type": "http.response.body", "body": data, "more_body": False})


def event(content: dict[str, Any]) -> bytes:
    """Return an event without a name."""
    return b"data: " + json_text(content) + b"\n\n"


def named_event(content: dict[str, Any]) -> bytes:
    """Return an event whose name is its type."""
    kind: str = content["type"]
    return b"event: " + kind.encode() + b"\n" + event(content)


T = TypeVar("T")


class AnswerSize:
    """The size of a whole answer while it grows."""

    def __init__(self, gateway: Gateway) -> None:
        self._limit = gateway.settings.max_answer_bytes
        self._size = 0

    def grow(self, size: int) -> None:
        """Raise InvalidRequest for an answer that has become too large."""
        self._size += size
        if self._size > self._limit:
            raise InvalidRequest(
                f"the answer is larger than {self._limit} bytes: ask for a stream, or for less"
            )


async def run_whole(
    generation: Generation,
    emit: Emit,
    finish: Callable[[], Awaitable[T]],
    receive: Receive,
    gateway: Gateway,
    within: contextlib.AbstractContextManager[None] | None = None,
) -> T:
    """Run to the end, within a context, and return what `finish` makes of it.

    Raise SurestepError.
    """

    async def work() -> T:
        await run_sequences(generation.sequences, emit, generation.max_open)
        return await finish()

    with accounted(generation), within or contextlib.nullcontext():
        return await until_disconnect(receive, work(), gateway.admission)


async def until_disconnect(
    receive: Receive, work: Coroutine[Any, Any, T], admission: Admission
) -> T:
    """Return the result of `work`; cancel it and raise Cancelled when the client disconnects."""
    try:
        async with asyncio.TaskGroup() as group:
            watcher = group.create_task(_raise_on_disconnect(receive))
            # A task of its own, so that a token need not come in through the whole application.
            result = await group.create_task(work)
            watcher.cancel()
        return result
    except BaseExceptionGroup as errors:
        raise first_error(errors) from None
    except asyncio.CancelledError:
        if admission.aborting:
            raise Unavailable("the server is shutting down") from None
        raise


async def _raise_on_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    raise Cancelled("the client went away")


@contextlib.contextmanager
def accounted(generation: Generation) -> Iterator[None]:
    """Record metrics, traces and one log line for the request, however it ends."""

    def told(outcome: str) -> None:
        for sequence in generation.sequences:
            journal = sequence.journal
            sequence.timer.resumed(journal.num_resumes, journal.num_resumed_tokens)
            sequence.timer.finished(sequence.end("error" if outcome == "error" else "abort"))
        if outcome == "done":
            generation.count_choices()
        tell_generation(generation)
        _log_end(generation, outcome)

    with ending(told):
        yield


def _log_end(generation: Generation, outcome: str) -> None:
    usage = generation.usage
    first = generation.sequences[0].timer.first_token_s
    logger.info(
        "%s %s: prompt=%d cached=%d output=%d choices=%d seed=%d first_token_s=%s resumes=%d",
        generation.id,
        outcome,
        usage.prompt,
        usage.cached,
        usage.output,
        len(generation.sequences),
        generation.seed,
        "-" if first is None else f"{first:.3f}",
        sum(sequence.journal.num_resumes for sequence in generation.sequences),
    )
