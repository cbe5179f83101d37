"""Bound the time of a step, after which its workers are given up for hung."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from enum import Enum
from typing import NamedTuple

from surestep_proto import supervisor_pb2 as pb

# What workers that are late may be doing, and the share of the floor before which they are kept:
# those at rest will not answer; those that run may have met what takes longer than ever before.
SHARES: Mapping[pb.Activity, float] = {
    pb.AT_REST: 1 / 6,
    pb.RUNNING: 1 / 2,
    pb.ACTIVITY_UNKNOWN: 1,
    pb.WAITING: 1,
    pb.AWAITING_COMPILER: 1,
}
_MARGIN = 8.0  # times the expected duration
_LEAST_MARGIN = 2.0  # the same where the ceiling would leave less
_WEIGHT = 0.1  # of the newest duration in the running mean
_MOST_DOUBLINGS = 4
_WINDOW = 1000  # durations kept for the quantiles


class Recent:
    """The latest measurements of something, and their quantiles."""

    def __init__(self) -> None:
        self._values: deque[float] = deque(maxlen=_WINDOW)

    def add(self, value: float) -> None:
        """Add a value; the oldest is forgotten."""
        self._values.append(value)

    def quantile(self, fraction: float) -> float:
        """Return a quantile of the values kept; 0 before the first."""
        ordered = sorted(self._values)
        return ordered[int(fraction * (len(ordered) - 1))] if ordered else 0.0


class StepKind(Enum):
    """Kind of work that dominates a step's duration."""

    PROMPT = 1
    DRAFTS = 2
    DECODE = 3


class StepClass(NamedTuple):
    """Steps that should take about as long as each other."""

    kind: StepKind
    size: int  # input rows, drafts included, in powers of two


class StepTimer:
    """Running means of step durations by class of step. All seconds.

    What was measured holds for the next epoch too: the workers that come back are the same machine.
    """

    def __init__(self, *, floor_s: float, ceiling_s: float, warmup_s: float) -> None:
        self._floor_s = floor_s
        self._ceiling_s = ceiling_s
        self._warmup_s = warmup_s
        self._mean_s: dict[StepKind, dict[int, float]] = {kind: {} for kind in StepKind}  # by size
        self._misses = 0  # since the last result
        self.recent_s = Recent()

    def budgets_s(self, step: StepClass) -> Mapping[pb.Activity, float]:
        """Return the time for a step, by what its workers are doing when it is late: a multiple of
        what is expected, or their share of the floor; warm-up's for a new kind.

        Where nothing comes back in time again and again, the machine may have become slow: the
        budget doubles from the second miss on, until there is a result.
        """
        expected_s = self._expected_s(step)
        if expected_s is None:
            return dict.fromkeys(SHARES, max(self._warmup_s, self._floor_s))
        extension = 2.0 ** min(max(self._misses - 1, 0), _MOST_DOUBLINGS)
        usual_s, least_s = _MARGIN * expected_s, _LEAST_MARGIN * expected_s
        return {
            doing: max(
                min(max(usual_s, share * self._floor_s) * extension, self._ceiling_s), least_s
            )
            for doing, share in SHARES.items()
        }

    @property
    def ceiling_s(self) -> float:
        """Time after which steps are given up, whatever their workers do."""
        return self._ceiling_s

    def _expected_s(self, step: StepClass) -> float | None:
        """Extrapolate from the nearest size; a larger step takes longer in proportion at most."""
        mean_s = self._mean_s[step.kind]
        if not mean_s:
            return None
        nearest = min(mean_s, key=lambda size: (abs(size - step.size), size))
        return mean_s[nearest] * 2.0 ** max(step.size - nearest, 0)

    def observe(self, step: StepClass, duration_s: float) -> None:
        """Learn from a step of this class that has finished."""
        self._misses = 0
        self.recent_s.add(duration_s)
        means = self._mean_s[step.kind]
        mean_s = means.get(step.size, duration_s)
        means[step.size] = mean_s + _WEIGHT * (duration_s - mean_s)

    def missed(self) -> None:
        """Note that a step did not finish within its budget."""
        self._misses += 1
