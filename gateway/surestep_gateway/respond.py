"""Running a generation and answering with one JSON body or a stream of events."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Coroutine
from typing import Any

import orjson
from starlette.responses import Response
from starlette.types import Receive, Scope, Send
from surestep_common.errors import Cancelled, SurestepError, Unavailable

from .admission import Admission
from .errors import JsonResponse, error_body
from .generation import Generation
from .sequence import Delta, OutputSequence, first_error, run_sequences
from .shapes import Gathered, Shape, usage

logger = logging.getLogger(__name__)

_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would hold the events back
]


async def json_answer(
    generation: Generation, shape: Shape, receive: Receive, admission: Admission
) -> Response:
    """Run to the end and answer at once. Raises SurestepError."""
    gathered = [Gathered() for _ in generation.sequences]

    async def emit(sequence: OutputSequence, delta: Delta) -> None:
        gathered[sequence.index].add(delta)

    run = run_sequences(generation.sequences, emit, generation.max_open)
    async with accounted(generation):
        await until_disconnect(receive, run, admission)
    choices = [shape.whole(one, gathered[one.index]) for one in generation.sequences]
    body = _envelope(generation, shape.name) | {"choices": choices, "usage": usage(generation)}
    return JsonResponse(body | shape.extra())


class EventStream(Response):
    """Server-sent events. The status is sent with the first token, so early errors keep theirs.

    A failure after that becomes an `error` event, and `[DONE]` is left out: clients take it for
    success.
    """

    def __init__(self, generation: Generation, shape: Shape, admission: Admission) -> None:
        super().__init__()
        self._admission = admission
        options = generation.body.stream_options
        self._generation = generation
        self._shape = shape
        self._usage_at_end = bool(options and options.include_usage)
        self._usage_always = bool(options and options.continuous_usage_stats)
        self._head = _envelope(generation, shape.chunk_name)
        self._opened: set[int] = set()
        self._started = False
        self._send: Send

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._send = send
        generation = self._generation
        run = run_sequences(generation.sequences, self._emit, generation.max_open)
        try:
            async with accounted(generation):
                await until_disconnect(receive, run, self._admission)
        except Cancelled:
            return
        except Exception as error:
            if not self._started:
                raise
            if not isinstance(error, SurestepError):
                logger.exception("a stream failed")
            await self._finish(_event(error_body(error)))
            return
        tail = b"data: [DONE]\n\n"
        if self._usage_at_end:
            tail = _event(self._head | {"choices": [], "usage": usage(generation)}) + tail
        await self._finish(tail)

    async def _emit(self, sequence: OutputSequence, delta: Delta) -> None:
        data = b""
        if sequence.index not in self._opened:
            data = await self._open(sequence)
        choice = self._shape.piece(sequence, delta)
        if choice is not None:
            data += self._chunk(choice)
        if data:
            await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def _open(self, sequence: OutputSequence) -> bytes:
        """Send the status with the first token of all; the sequence's opening event."""
        extra = {}
        if not self._started:
            self._started = True
            extra = self._shape.extra()
            start = {"type": "http.response.start", "status": 200, "headers": _STREAM_HEADERS}
            await self._send(start)
        self._opened.add(sequence.index)
        choice = self._shape.opening(sequence)
        return self._chunk(choice, extra) if choice is not None else b""

    def _chunk(self, choice: dict[str, Any], extra: dict[str, Any] | None = None) -> bytes:
        chunk = self._head | {"choices": [choice]}
        if extra:
            chunk |= extra
        if self._usage_always:
            chunk["usage"] = usage(self._generation)
        return _event(chunk)

    async def _finish(self, data: bytes) -> None:
        await self._send({"type": "http.response.body", "body": data, "more_body": False})


def _envelope(generation: Generation, name: str) -> dict[str, Any]:
    return {
        "id": generation.id,
        "object": name,
        "created": generation.created,
        "model": generation.model,
    }


def _event(content: dict[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(content) + b"\n\n"


async def until_disconnect(
    receive: Receive, work: Coroutine[Any, Any, None], admission: Admission
) -> None:
    """Run `work`, or cancel it when the client goes away. Raises Cancelled then."""
    try:
        async with asyncio.TaskGroup() as group:
            watcher = group.create_task(_raise_on_disconnect(receive))
            await work
            watcher.cancel()
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


@contextlib.asynccontextmanager
async def accounted(generation: Generation) -> AsyncIterator[None]:
    """Metrics and one log line for the request, however it ends."""
    outcome = "error"
    try:
        yield
        outcome = "done"
    except (Cancelled, asyncio.CancelledError):
        outcome = "abort"
        raise
    finally:
        for sequence in generation.sequences:
            reason = sequence.finish_reason or ("error" if outcome == "error" else "abort")
            journal = sequence.journal
            sequence.timer.resumed(journal.num_resumes, journal.num_resumed_tokens)
            sequence.timer.finished(reason, len(journal.prompt_ids), sequence.num_tokens)
        _log_end(generation, outcome)


def _log_end(generation: Generation, outcome: str) -> None:
    counts = usage(generation)
    first = generation.sequences[0].timer.first_token_s
    logger.info(
        "%s %s: prompt=%d cached=%d output=%d choices=%d seed=%d first_token_s=%s resumes=%d",
        generation.id,
        outcome,
        counts["prompt_tokens"],
        counts["prompt_tokens_details"]["cached_tokens"],
        counts["completion_tokens"],
        len(generation.sequences),
        generation.seed,
        "-" if first is None else f"{first:.3f}",
        sum(sequence.journal.num_resumes for sequence in generation.sequences),
    )
