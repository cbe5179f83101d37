"""When a request waited, computed its prompt and decoded, in one attempt after the other."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

_KEPT = 32  # the newest ones, of a request that gives up its slot again and again


@dataclass(slots=True)
class Attempt:
    """From the queue to the end of a stay in a slot. Times are on the scheduler's clock."""

    queued_at: float
    admitted_at: float | None = None
    first_at: float | None = None  # tokens came
    last_at: float | None = None
    ended_at: float | None = None
    lost: bool = False  # the workers were, and the next attempt goes on from here


class Timeline:
    """The attempts at a request, oldest first. There is more than one after the loss of workers,
    or when the request gave its slot up for others."""

    def __init__(self, arrived: float) -> None:
        self.attempts = deque([Attempt(arrived)], maxlen=_KEPT)

    def admitted(self, now: float) -> None:
        """Begin a stay in a slot. An earlier stay ended with its last tokens."""
        newest = self.attempts[-1]
        if newest.admitted_at is not None:
            newest.ended_at = newest.last_at or newest.admitted_at
            self.attempts.append(Attempt(newest.ended_at))
        self.attempts[-1].admitted_at = now

    def tokens(self, now: float) -> None:
        """Note that tokens came; those read after their workers were lost begin nothing."""
        newest = self.attempts[-1]
        if newest.admitted_at is None:
            return
        newest.first_at = newest.first_at or now
        newest.last_at = now

    def lost(self, now: float) -> None:
        """End an attempt in a slot, as the workers are gone; what waits goes on waiting."""
        newest = self.attempts[-1]
        if newest.admitted_at is not None:
            newest.ended_at, newest.lost = now, True
            self.attempts.append(Attempt(now))

    def end(self, now: float) -> None:
        """End the newest attempt."""
        self.attempts[-1].ended_at = now
