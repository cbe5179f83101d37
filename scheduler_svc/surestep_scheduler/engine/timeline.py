"""Times: of the attempts of a request, of the latest steps, and totals since the process began."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

import numpy as np
from surestep_common.invariants import DECODE, POOL, VERIFY, IntArray

from surestep_scheduler.core.messages import Outcome, RankTimes

# Seconds that a step is within, by which steps are counted; those beyond all come last.
BOUNDS_S = (
    0.0005,
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
    30.0,
)
_PHASES = len(RankTimes._fields)


class StepTimes:
    """Seconds, but for `by_rank`."""

    def __init__(self) -> None:
        self.plan_s = 0.0
        self.apply_s = 0.0
        self.step_s = 0.0
        self.num_within = [0] * (len(BOUNDS_S) + 1)
        self.by_rank = np.zeros((0, _PHASES), dtype=np.int64)  # microseconds; columns of RankTimes

    def planned(self, took_s: float) -> None:
        self.plan_s += took_s

    def applied(self, took_s: float) -> None:
        self.apply_s += took_s

    def answered(self, took_s: float, ranks: Sequence[RankTimes], *, follows: bool) -> None:
        """Count a step. Its gap counts if it `follows` others, so that there was work to do."""
        self.step_s += took_s
        self.num_within[bisect_left(BOUNDS_S, took_s)] += 1
        times = np.array(ranks, dtype=np.int64)
        if not follows:
            times[:, -1] = 0
        if len(times) > len(self.by_rank):  # these workers are more than the ones before
            more = np.zeros((len(times) - len(self.by_rank), _PHASES), dtype=np.int64)
            self.by_rank = np.concatenate((self.by_rank, more))
        self.by_rank[: len(times)] += times


_RECENT = 512


class StepRecord(NamedTuple):
    """Record of a step. Times are on the scheduler's clock, in seconds."""

    epoch: int
    step: int
    ended_at: float
    took_s: float
    prompt_rows: int
    decode_rows: int
    verify_rows: int
    num_emitted: int  # tokens
    num_accepted: int  # of them, drafts


class RecentSteps:
    """The newest steps, whatever their epoch."""

    def __init__(self) -> None:
        self._steps: deque[StepRecord] = deque(maxlen=_RECENT)

    def add(self, outcome: Outcome, mode: IntArray, now: float, took_s: float) -> None:
        """Record a step whose rows had these modes [R]."""
        rows = np.bincount(mode, minlength=POOL + 1)
        decoding, verifying = int(rows[DECODE]), int(rows[VERIFY])
        self._steps.append(
            StepRecord(
                outcome.epoch,
                outcome.step,
                now,
                took_s,
                len(mode) - decoding - verifying,
                decoding,
                verifying,
                len(outcome.token_ids),
                int(outcome.rows.n_drafts_emitted.sum()),
            )
        )

    def latest(self, count: int) -> Sequence[StepRecord]:
        """Return at most `count` steps, oldest first."""
        return list(islice(reversed(self._steps), count))[::-1]


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
