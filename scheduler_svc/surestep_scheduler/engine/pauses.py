"""Pauses by operators: what is asked for, and the requests that wait for its end.

A pause of level 0 stops plans; the workers stay. From level 1 on the epoch ends and with it the
workers: a sleeping engine is between two epochs, and wakes as it recovers from the loss of one.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Sequence

from surestep_common.errors import InvalidRequest, Unavailable
from surestep_proto import scheduler_pb2 as pb

PARTS = ("weights", "kv_cache")  # of what a sleep gives back, in the order of their waking
DEEPEST = 2  # level
RETRY_AFTER_S = 1.0
_MODES = (pb.PAUSE_ABORT, pb.PAUSE_WAIT, pb.PAUSE_KEEP)


class Slept(Unavailable):
    """End of an epoch because the workers are put to sleep."""


class Pauses:
    """Pause that operators have asked for, if there is one. Every change is announced."""

    def __init__(self) -> None:
        self.info: pb.PauseInfo | None = None  # None: no pause
        self.stopping = False  # nothing more is planned
        self.slept_level = 0  # of the sleep that all supervisors have confirmed
        self.known = False  # an operator, or the supervisors, have told of one or of its end
        self._closed = False
        self._changed = asyncio.Event()

    @property
    def level(self) -> int:
        """Depth of the pause; 0 without one, too."""
        return 0 if self.info is None else self.info.level

    @property
    def stops_workers(self) -> bool:
        """Return whether there shall be no workers."""
        return self.stopping and self.level > 0

    @property
    def words(self) -> str:
        """Reason that clients are told."""
        state = f"asleep (level {self.level})" if self.level else "paused"
        return f"the engine is {state}: an operator asked for it"

    def begin(self, level: int, mode: pb.PauseMode, tags: Sequence[str] = ()) -> None:
        """Begin a pause, or deepen the one there is. Raises InvalidRequest."""
        _check(tags)
        if level > DEEPEST:
            raise InvalidRequest(f"there is no sleep of level {level}", param="level")
        if mode not in _MODES:
            raise InvalidRequest(f"there is no mode {mode}", param="mode")
        level = max(level, self.level)
        self.info = pb.PauseInfo(level=level, mode=mode, asleep=(tags or PARTS) if level else ())
        self.known = True
        self.announce()

    def adopt(self, level: int) -> None:
        """Take over the sleep that another scheduler has begun."""
        self.begin(level, pb.PAUSE_WAIT)
        self.stopping = True

    def wake(self, tags: Iterable[str]) -> Sequence[str]:
        """Wake the named parts, or all; return those that are still asleep.

        Raises InvalidRequest for a part that is not known.
        """
        named = frozenset(tags)
        _check(named)
        info = self.info
        asleep = [part for part in info.asleep if named and part not in named] if info else []
        if info is not None and asleep:
            self.info = pb.PauseInfo(level=info.level, mode=info.mode, asleep=asleep)
        else:
            self.info, self.stopping, self.slept_level = None, False, 0
        self.known = True
        self.announce()
        return asleep

    def restore(self, info: pb.PauseInfo | None) -> None:
        """Return to what was asked for before: no pause, or one in which workers stay."""
        self.wake(())
        if info is not None:
            self.begin(info.level, info.mode)
            self.stopping = True
            self.announce()

    def close(self) -> None:
        """Refuse requests that wait for the end of a pause: this scheduler leaves."""
        self._closed = True
        self.announce()

    def announce(self) -> None:
        """Have all that wait look again."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def change(self, timeout_s: float) -> None:
        """Return at the next change, or when the time is over."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()

    async def until(self, condition: Callable[[], bool], poll_s: float) -> None:
        """Return when the condition holds, which others may make true without a word."""
        while not condition():
            await self.change(poll_s)

    async def over(self) -> None:
        """Return when there is no pause. Raises Unavailable where it refuses requests."""
        while self.info is not None and not self._closed:
            if self.info.mode == pb.PAUSE_ABORT:
                raise Unavailable(self.words, retry_after=RETRY_AFTER_S)
            await self._changed.wait()


def _check(tags: Iterable[str]) -> None:
    if unknown := frozenset(tags).difference(PARTS):
        message = f"no part is called '{min(unknown)}', only {' and '.join(PARTS)}"
        raise InvalidRequest(message, param="tags")
