"""Durations of steps and of their parts: totals since the start of the process."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

import numpy as np

from surestep_scheduler.core.messages import RankTimes

# Seconds that a step is within, by which steps are counted; those beyond all come last.
BOUNDS_S = (
    *(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25),
    *(0.5, 1.0, 2.5, 5.0, 10.0, 30.0),
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
