"""Lost epochs: why, how long it took to notice and to recover, and what had to be done again."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

_KEPT = 50
_AT_ONCE = 3  # losses in a row without a step after which it is tried again at once
_FIRST_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 30.0


class Cause(StrEnum):
    """Why an epoch was lost; see Incident in scheduler.proto."""

    WORKER_EXIT = "worker_exit"
    WORKER_HANG = "worker_hang"
    WORKER_ERROR = "worker_error"
    OUT_OF_MEMORY = "out_of_memory"
    CONNECTION = "connection"
    LEDGER = "ledger"
    DIGEST = "digest"
    NON_FINITE = "non_finite"
    DRAFTER = "drafter"
    OPERATOR = "operator"

    @property
    def implicates_requests(self) -> bool:
        """Return whether a request that was under way may be the cause."""
        return self not in (Cause.NON_FINITE, Cause.DRAFTER, Cause.OPERATOR)


class Replay(NamedTuple):
    """Requests that a fence sends back to the queue."""

    num_requests: int
    num_tokens: int  # that they had, prompts included


@dataclass(slots=True)
class Incident:
    """Lost epoch. `noticed_at` is on the scheduler's clock."""

    cause: Cause
    reason: str
    epoch: int
    noticed_at: float
    detect_s: float  # in which workers had work to do, and their end was not noticed
    replay: Replay
    recover_s: float | None = None  # from being noticed to the next step; None = not yet


class IncidentLog:
    """The latest incidents, and totals over all of them."""

    def __init__(self) -> None:
        self.latest: deque[Incident] = deque(maxlen=_KEPT)  # newest first
        self.by_cause: Counter[Cause] = Counter()
        self.detect_s = 0.0
        self.recover_s = 0.0
        self.num_recoveries = 0
        self.replayed_tokens = 0
        self._open: list[Incident] = []  # that no step has followed yet

    @property
    def pending(self) -> bool:
        """Return whether the workers have not shown yet that they are back."""
        return bool(self._open)

    @property
    def pause_s(self) -> float:
        """Seconds before the next attempt, more and more for workers that come to no step."""
        doublings = len(self._open) - _AT_ONCE
        return 0.0 if doublings < 0 else min(_FIRST_PAUSE_S * 2.0**doublings, _LONGEST_PAUSE_S)

    def lost(self, incident: Incident) -> None:
        """Record the loss of an epoch."""
        self.latest.appendleft(incident)
        self.by_cause[incident.cause] += 1
        self.detect_s += incident.detect_s
        self.replayed_tokens += incident.replay.num_tokens
        self._open.append(incident)

    def recovered(self, now: float) -> list[Incident]:
        """Close the open incidents after a step was applied; return them, oldest first."""
        over, self._open = self._open, []
        for incident in over:
            incident.recover_s = now - incident.noticed_at
            self.recover_s += incident.recover_s
            self.num_recoveries += 1
        return over
