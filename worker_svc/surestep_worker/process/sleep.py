"""Sleep of a rank: its process has ended, and none is started until it is woken.

All that the process had is the machine's again. Its supervisor has the weights, and may keep them.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from surestep_proto import supervisor_pb2 as pb

from .rank_process import RankProcess

WEIGHTS_STAY, WEIGHTS_GO = 1, 2  # levels
_LOOK_S = 0.05  # between two looks for a rank that has just been started


class Sleep:
    """Sleep and wake of one rank, between the supervisor's RPCs and its loop."""

    def __init__(self, level: int = 0) -> None:
        """Begin asleep, unless `level` is 0."""
        self.level = level  # asked for; 0 = awake
        self._awake = asyncio.Event()
        if not level:
            self._awake.set()
        self._asked = asyncio.Event()
        self._sound = asyncio.Event()

    @property
    def sound(self) -> bool:
        """Return whether no rank runs, and none will."""
        return self._sound.is_set()

    async def through(self) -> None:
        """Return when a rank may be started. The loop has none while it waits here."""
        while not self._awake.is_set():
            self._sound.set()
            await self._awake.wait()
        self._sound.clear()

    async def unless_asked(self, seconds: float) -> None:
        """Wait so long before the next rank, or until there shall be none."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._asked.wait()

    async def begin(self, level: int, rank: Callable[[], RankProcess | None]) -> None:
        """End `rank`, and each that the loop was about to start; return when there is none."""
        self.level = max(self.level, level)
        self._awake.clear()
        self._asked.set()
        while not self.sound and self.level:
            if (running := rank()) is not None:
                await running.end(pb.REQUESTED, "put to sleep", dump=False)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_S):
                    await self._sound.wait()

    def end(self) -> None:
        """Let the loop start a rank."""
        self.level = 0
        self._asked.clear()
        self._awake.set()
