"""Admission of the sequences of one request as a whole."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator


class Siblings:
    """While one sequence is at a scheduler, the others may wait for room in its queue.

    So a request of more sequences than a queue has room for is served, and one that finds no room
    at all is refused at once. The sequences wait in line, and the first of them retries now and
    then.
    """

    def __init__(self) -> None:
        self._calls = 0  # that are open
        self._started = False  # some scheduler has run one
        self._line = asyncio.Lock()
        self._room = asyncio.Semaphore(0)  # one more try for each that has left a queue

    @property
    def accepted(self) -> bool:
        """Return whether any sequence of the request has been accepted."""
        return self._calls > 0 or self._started

    @contextlib.contextmanager
    def calling(self) -> Iterator[None]:
        """Count the call of one sequence as open."""
        self._calls += 1
        try:
            yield
        finally:
            self._calls -= 1

    def started(self) -> None:
        """Record that one sequence has left the queue."""
        self._started = True
        self._room.release()

    async def wait_for_room(self, retry_after_s: float) -> None:
        """Wait in line until another attempt may succeed."""
        async with self._line:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(retry_after_s):
                    await self._room.acquire()
