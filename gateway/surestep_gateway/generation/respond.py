"""Running a generation, and responding with one JSON body."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from starlette.types import Receive
from surestep_common.errors import Cancelled, InvalidRequest, Unavailable

from surestep_gateway.context import Gateway
from surestep_gateway.http.admission import Admission

from .generation import Generation
from .request_spans import failures, tell_generation
from .sequence import Emit, first_error, run_sequences

logger = logging.getLogger(__name__)

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

    async with accounted(generation):
        with within or contextlib.nullcontext():
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
