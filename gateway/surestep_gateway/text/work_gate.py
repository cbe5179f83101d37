"""A semaphore that prefers small work, and fills its places neither with large work nor for one
caller.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from bisect import insort
from collections import Counter
from collections.abc import AsyncIterator
from typing import NamedTuple

_SIZE_PER_S = 1 << 18  # work that is so much larger goes after what comes a second later


class _Waiting(NamedTuple):
    turn: float  # when it came, in seconds, and later by its size: nothing waits for ever
    number: int  # so that no two are equal
    size: int
    caller: str
    ready: asyncio.Future[None]


class WorkGate:
    """Admits work to a limited number of places; `size` is in bytes or similar units."""

    def __init__(self, places: int, *, large: int) -> None:
        """Work above `large` leaves half of the places to the rest, if there are several."""
        self._free = places
        self._large = large
        self._free_for_large = max(1, places // 2)
        self._most_of_caller = max(1, places - 1)
        self._held = Counter[str]()  # places, by caller
        self._waiting: list[_Waiting] = []
        self._numbers = itertools.count()

    @property
    def num_waiting(self) -> int:
        """Number of jobs that wait for a place."""
        return len(self._waiting)

    @contextlib.asynccontextmanager
    async def place(self, size: int, caller: str = "") -> AsyncIterator[None]:
        """Hold a place, once it is free. If cancelled before that, the work never begins."""
        await self.enter(size, caller)
        try:
            yield
        finally:
            self.leave(size, caller)

    async def enter(self, size: int, caller: str = "") -> None:
        """Wait for a place, which `leave` gives back.

        A caller who holds fewer places goes first. A named one never holds all of several.
        """
        turn = time.monotonic() + size / _SIZE_PER_S
        ready = asyncio.get_running_loop().create_future()
        mine = _Waiting(turn, next(self._numbers), size, caller, ready)
        insort(self._waiting, mine)
        self._let_in()
        try:
            await ready
        except asyncio.CancelledError:
            if mine in self._waiting:
                self._waiting.remove(mine)
            else:
                self.leave(size, caller)
            raise

    def leave(self, size: int, caller: str = "") -> None:
        self._take(size, caller, -1)
        self._let_in()

    def _let_in(self) -> None:
        while entering := list(filter(self._may_enter, self._waiting)):
            one = min(entering, key=lambda waiting: self._held[waiting.caller])  # of equals, turns
            self._waiting.remove(one)
            self._take(one.size, one.caller, 1)
            one.ready.set_result(None)

    def _may_enter(self, one: _Waiting) -> bool:
        if one.ready.done():  # given up just now, and about to leave by itself
            return False
        if one.caller and self._held[one.caller] >= self._most_of_caller:
            return False
        return self._free > 0 and (one.size <= self._large or self._free_for_large > 0)

    def _take(self, size: int, caller: str, count: int) -> None:
        self._free -= count
        self._held[caller] += count
        if not self._held[caller]:
            del self._held[caller]
        if size > self._large:
            self._free_for_large -= count
