"""A semaphore that prefers small work and never fills every place with large work."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from bisect import insort
from collections.abc import AsyncIterator
from typing import NamedTuple

_SIZE_PER_S = 1 << 18  # work that is so much larger goes after what comes a second later


class _Waiting(NamedTuple):
    turn: float  # when it came, in seconds, and later by its size: nothing waits for ever
    number: int  # so that no two are equal
    size: int
    ready: asyncio.Future[None]


class WorkGate:
    """Admits work to a limited number of places; `size` is in bytes or similar units."""

    def __init__(self, places: int, *, large: int) -> None:
        """Work above `large` leaves one place to the rest, if there are several."""
        self._free = places
        self._large = large
        self._free_for_large = max(1, places - 1)
        self._waiting: list[_Waiting] = []
        self._numbers = itertools.count()

    @property
    def num_waiting(self) -> int:
        """Number of jobs that wait for a place."""
        return len(self._waiting)

    @contextlib.asynccontextmanager
    async def place(self, size: int) -> AsyncIterator[None]:
        """Hold a place, once it is free. If cancelled before that, the work never begins."""
        await self.enter(size)
        try:
            yield
        finally:
            self.leave(size)

    async def enter(self, size: int) -> None:
        """Wait for a place, which `leave` gives back."""
        turn = time.monotonic() + size / _SIZE_PER_S
        ready = asyncio.get_running_loop().create_future()
        mine = _Waiting(turn, next(self._numbers), size, ready)
        insort(self._waiting, mine)
        self._let_in()
        try:
            await ready
        except asyncio.CancelledError:
            if mine in self._waiting:
                self._waiting.remove(mine)
            else:
                self.leave(size)
            raise

    def leave(self, size: int) -> None:
        self._take(size, -1)
        self._let_in()

    def _let_in(self) -> None:
        for one in list(self._waiting):
            if one.ready.done():  # given up just now, and about to leave by itself
                continue
            if self._free and (one.size <= self._large or self._free_for_large):
                self._waiting.remove(one)
                self._take(one.size, 1)
                one.ready.set_result(None)

    def _take(self, size: int, count: int) -> None:
        self._free -= count
        if size > self._large:
            self._free_for_large -= count
