"""Several streams of chunks as one, in the order in which chunks come."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing

from surestep_common.tasks import end
from surestep_proto.scheduler_pb2 import GenerateChunk

Stream = AsyncGenerator[GenerateChunk, None]


class Merged:
    """Chunks with the index of their stream. What waits to be read is what a reader has not taken.

    The first error of a stream ends all of them.
    """

    def __init__(self, tasks: asyncio.TaskGroup, streams: Sequence[Stream]) -> None:
        """`tasks` outlive the streams."""
        self._waiting: asyncio.Queue[tuple[int, GenerateChunk] | Exception | None] = asyncio.Queue()
        self._feeding = tasks.create_task(self._feed(streams))

    async def __aiter__(self) -> AsyncIterator[tuple[int, GenerateChunk]]:
        while (item := await self._waiting.get()) is not None:
            if isinstance(item, Exception):
                raise item
            yield item

    def stop(self) -> None:
        """End the streams; the iteration ends after what has come."""
        self._feeding.cancel()
        self._waiting.put_nowait(None)  # a task that is cancelled before it begins says nothing

    async def close(self) -> None:
        """Return when the streams have ended, and end them."""
        await end(self._feeding)

    async def _feed(self, streams: Sequence[Stream]) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                for index, stream in enumerate(streams):
                    group.create_task(self._pump(index, stream))
        except* Exception as errors:  # noqa: BLE001  # whatever it is, the reader gets it
            self._waiting.put_nowait(_first(errors))
        self._waiting.put_nowait(None)

    async def _pump(self, index: int, stream: Stream) -> None:
        async with aclosing(stream):
            async for chunk in stream:
                self._waiting.put_nowait((index, chunk))


def _first(errors: BaseExceptionGroup[Exception]) -> Exception:
    error = errors.exceptions[0]
    return _first(error) if isinstance(error, BaseExceptionGroup) else error
