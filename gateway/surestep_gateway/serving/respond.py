"""Running a generation and responding with one JSON body or a stream of events."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Coroutine
from typing import Any, TypeVar

import orjson
from starlette.responses import Response
from starlette.types import Receive, Scope, Send
from surestep_common.errors import Cancelled, InvalidRequest, SurestepError, Unavailable

from surestep_gateway.context import Gateway
from surestep_gateway.http.admission import Admission
from surestep_gateway.http.errors import error_body
from surestep_gateway.output.completion_output import CompletionOutput
from surestep_gateway.output.json_pieces import JsonPieces, json_pieces, send_pieces
from surestep_gateway.output.sequence import Delta, OutputSequence, first_error, run_sequences

from .generation import Generation
from .request_spans import failures, tell_generation
from .responses import ResponseBuilder

logger = logging.getLogger(__name__)

T = TypeVar("T")

_GRACE_S = 2.0  # after the deadline of a request, for the client to read the error
_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would hold the events back
]


async def json_answer(
    generation: Generation, builder: ResponseBuilder, receive: Receive, gateway: Gateway
) -> Response:
    """Run to the end and respond with one body. Raise SurestepError."""
    gathered: dict[int, CompletionOutput] = {}
    size, limit = 0, gateway.settings.max_answer_bytes

    async def emit(sequence: OutputSequence, delta: Delta) -> None:
        nonlocal size
        output = gathered.get(sequence.index)
        if output is None:
            output = gathered[sequence.index] = CompletionOutput(await builder.before(sequence))
            size += output.logprobs.num_bytes + len(generation.prompt_of(sequence).text or "")
        before = output.logprobs.num_bytes
        output.add(delta, builder.logprobs(sequence, delta.logprobs))
        size += len(delta.text) + output.logprobs.num_bytes - before
        if size > limit:
            raise InvalidRequest(
                f"the answer is larger than {limit} bytes: ask for a stream, or for less"
            )

    async def work() -> list[bytes | bytearray]:
        await run_sequences(generation.sequences, emit, generation.max_open)
        return await _whole_answer(generation, builder, gathered)

    async with accounted(generation):
        pieces = await until_disconnect(receive, work(), gateway.admission)
    return JsonPieces(pieces, gateway.answers)


async def _whole_answer(
    generation: Generation, builder: ResponseBuilder, gathered: dict[int, CompletionOutput]
) -> list[bytes | bytearray]:
    """Return the response in pieces, one choice at a time, so that other tasks can run."""
    pieces: list[bytes | bytearray] = [orjson.dumps(_envelope(generation, builder.name))[:-1]]
    pieces.append(b',"choices":[')
    for sequence in generation.sequences:
        if sequence.index:
            pieces.append(b",")
        pieces += json_pieces(await builder.whole(sequence, gathered.pop(sequence.index)))
        await asyncio.sleep(0)
    first, *rest = json_pieces({"usage": generation.usage.shown()} | await builder.extra())
    return [*pieces, b"],", first[1:], *rest]


class EventStream(Response):
    """Server-sent events. The status is sent with the first token, so early errors keep theirs.

    A failure after that becomes an `error` event, and `[DONE]` is left out: clients take it for
    success.
    """

    def __init__(
        self,
        generation: Generation,
        builder: ResponseBuilder,
        admission: Admission,
        *,
        force_usage: bool = False,  # on every event
    ) -> None:
        super().__init__()
        self._admission = admission
        options = generation.body.stream_options
        self._generation = generation
        self._builder = builder
        include = bool(options and options.include_usage)
        self._usage_at_end = force_usage or include
        self._usage_always = force_usage or bool(
            include and options and options.continuous_usage_stats
        )
        self._head = _envelope(generation, builder.chunk_name)
        self._opened: set[int] = set()
        self._started = False
        self._one_event = asyncio.Lock()  # at a time
        self._send: Send

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._send = send
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
            tail = _event(self._head | {"choices": [], "usage": generation.usage.shown()}) + tail
        await self._finish(tail)

    async def _emit(self, sequence: OutputSequence, delta: Delta) -> None:
        async with self._one_event:
            if sequence.index not in self._opened:
                self._opened.add(sequence.index)
                await self._open(sequence)
            choice = self._builder.piece(sequence, delta)
            if choice is not None:
                data = _event(self._chunk(choice))
                await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def _open(self, sequence: OutputSequence) -> None:
        """Send the status with the first token of all, and the sequence's opening event."""
        extra = {}
        if not self._started:
            extra = await self._builder.extra()
            self._started = True
            start = {"type": "http.response.start", "status": 200, "headers": _STREAM_HEADERS}
            await self._send(start)
        choice = await self._builder.opening(sequence)
        if choice is not None:
            first, *rest = json_pieces(self._chunk(choice) | extra)
            pieces = [b"data: " + first, *rest]
            pieces[-1] += b"\n\n"
            await send_pieces(self._send, pieces, more_body=True)

    def _chunk(self, choice: dict[str, Any]) -> dict[str, Any]:
        chunk = self._head | {"choices": [choice]}
        if self._usage_at_end:  # null until the last one, as OpenAI has it
            chunk["usage"] = self._generation.usage.shown() if self._usage_always else None
        return chunk

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
    receive: Receive, work: Coroutine[Any, Any, T], admission: Admission
) -> T:
    """Return the result of `work`; cancel it and raise Cancelled when the client disconnects."""
    try:
        async with asyncio.TaskGroup() as group:
            watcher = group.create_task(_raise_on_disconnect(receive))
            result = await work
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


@contextlib.asynccontextmanager
async def accounted(generation: Generation) -> AsyncIterator[None]:
    """Record metrics, traces and one log line for the request, however it ends."""
    outcome = "error"
    try:
        with failures():
            yield
        outcome = "done"
    except (Cancelled, asyncio.CancelledError):
        outcome = "abort"
        raise
    finally:
        for sequence in generation.sequences:
            journal = sequence.journal
            sequence.timer.resumed(journal.num_resumes, journal.num_resumed_tokens)
            sequence.timer.finished(sequence.end("error" if outcome == "error" else "abort"))
        if outcome == "done":
            generation.count_choices()
        tell_generation(generation)
        _log_end(generation, outcome)


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
