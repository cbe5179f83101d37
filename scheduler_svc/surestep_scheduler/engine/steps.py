"""Steps against the clock: how long each may take, when it is late, and what it took. All seconds.

After their time workers are given up for hung.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Mapping, Sequence
from enum import Enum
from itertools import islice
from typing import NamedTuple

import numpy as np
from surestep_common.invariants import DECODE, POOL, VERIFY, IntArray
from surestep_proto import supervisor_pb2 as pb

from surestep_scheduler.core.messages import Outcome, Plan, RankTimes
from surestep_scheduler.speculation.draft_length import Expected

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
_RECENT = 512  # steps that are kept one by one


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
            return self.unknown_s
        extension = 2.0 ** min(max(self._misses - 1, 0), _MOST_DOUBLINGS)
        usual_s, least_s = _MARGIN * expected_s, _LEAST_MARGIN * expected_s
        return {
            doing: max(
                min(max(usual_s, share * self._floor_s) * extension, self._ceiling_s), least_s
            )
            for doing, share in SHARES.items()
        }

    @property
    def unknown_s(self) -> Mapping[pb.Activity, float]:
        """Return the time for a step of which it is not known how long it takes."""
        return dict.fromkeys(SHARES, max(self._warmup_s, self._floor_s))

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


def classify(plan: Plan) -> StepClass:
    drafts = StepKind.DRAFTS if plan.rows.max_drafts.any() else StepKind.DECODE
    return StepClass(
        StepKind.PROMPT if plan.rows.num_tokens.any() else drafts, plan.num_step_tokens.bit_length()
    )


class Sent(NamedTuple):
    """A plan on its way."""

    step_class: StepClass
    sent_at: float
    budgets_s: Mapping[pb.Activity, float]  # by what its workers are doing when it is late
    expected: Expected  # not known if prompts are in it
    follows: bool  # there was work before it, so that the workers should not have had to wait
    mode: IntArray  # of its rows
    captures: bool  # a kind of step before it, which takes a while

    @property
    def budget_s(self) -> float:
        """The longest of its budgets."""
        return self.budgets_s[pb.ACTIVITY_UNKNOWN]


class StepMonitor:
    """Monitor of the steps of all epochs. Times `now` are on one clock."""

    def __init__(self, timer: StepTimer) -> None:
        self.timer = timer
        self.times = StepTimes()
        self.recent = RecentSteps()
        self.gaps_s = Recent()  # in which workers had work to do and did not do it
        self.last_step_at: float | None = None
        self.last_token_at: float | None = None
        self.num_deadlines_exceeded = 0
        self._sent: deque[Sent] = deque()
        self._busy = False
        self._not_before = -math.inf  # no step counts as started earlier
        self._extended = False  # the oldest step, already
        self._looked_s = 0.0  # after so long at the oldest step, already

    def open_epoch(self) -> None:
        """Begin an epoch, with nothing in flight."""
        self._sent.clear()
        self._busy = self._extended = False
        self._looked_s = 0.0

    def sent(self, plan: Plan, expected: Expected, now: float) -> Sent:
        """Start the clock of a plan that leaves."""
        step_class = classify(plan)
        known = Expected() if plan.rows.num_tokens.any() else expected
        timer, captures = self.timer, plan.capture > 0
        budgets_s = timer.unknown_s if captures else timer.budgets_s(step_class)
        sent = Sent(step_class, now, budgets_s, known, self._busy, plan.rows.mode, captures)
        self._busy = True
        self._sent.append(sent)
        return sent

    def nothing_to_send(self) -> None:
        """Note that the next plan may find the workers idle."""
        self._busy = bool(self._sent)

    def answered(self, gap_s: float, now: float) -> tuple[Sent, float]:
        """Stop the clock of the oldest step, with `gap_s` idle; return it and its duration."""
        sent, self._extended, self._looked_s = self._sent.popleft(), False, 0.0
        took_s = now - self._started_at(sent)
        if not sent.captures:
            self.timer.observe(sent.step_class, took_s)
        self.last_step_at = now
        if sent.follows:
            self.gaps_s.add(gap_s)
        return sent, took_s

    @property
    def due_at(self) -> float:
        """When the oldest step in flight may be late; infinity when there is none."""
        if not self._sent:
            return math.inf
        budgets_s = self._sent[0].budgets_s.values()
        budget_s = min((s for s in budgets_s if s > self._looked_s), default=self._looked_s)
        return self._started_at(self._sent[0]) + budget_s

    @property
    def lost_at(self) -> float:
        """When the oldest step in flight is late whatever is not known; infinity if none is."""
        return self._started_at(self._sent[0]) + self._sent[0].budget_s if self._sent else math.inf

    def has_more_time(self, doing: pb.Activity, now: float) -> bool:
        """Return whether the oldest step, which may be late, has more time now that it is known
        what its workers are doing.
        """
        oldest = self._sent[0]
        bounded = now - self._begun_at(oldest) >= self.timer.ceiling_s
        if doing == pb.AWAITING_COMPILER or (doing == pb.WAITING and not bounded):
            self.restart_deadline(now)
            return True
        self._looked_s = now - self._started_at(oldest)
        return self._looked_s < oldest.budgets_s[doing]

    def missed(self) -> None:
        """Note that the oldest step was late."""
        self.num_deadlines_exceeded += 1
        self.timer.missed()

    def extend_deadline(self, now: float) -> bool:
        """Give the step in flight its time again, once, after this process was asleep itself."""
        extended, self._extended = self._extended, True
        if not extended:
            self.restart_deadline(now)
        return not extended

    def restart_deadline(self, now: float) -> None:
        """Give the step in flight its time again: the workers are known not to hang."""
        self._not_before, self._looked_s = now, 0.0

    def silent_s(self, now: float) -> float:
        """Return how long workers that should have answered have shown no sign of life."""
        return now - self._started_at(self._sent[0]) if self._sent else 0.0

    def _started_at(self, sent: Sent) -> float:
        """Workers run one step at a time: a step starts when the one before it has ended."""
        return max(self._begun_at(sent), self._not_before)

    def _begun_at(self, sent: Sent) -> float:
        last_step_at = -math.inf if self.last_step_at is None else self.last_step_at
        return max(sent.sent_at, last_step_at)
