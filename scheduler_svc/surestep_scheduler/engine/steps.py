"""The steps in flight against the clock: when each is late, and what they took. All seconds."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from typing import NamedTuple

from surestep_common.invariants import IntArray
from surestep_proto import supervisor_pb2 as pb

from surestep_scheduler.core.messages import Plan
from surestep_scheduler.recovery.deadline import Recent, StepClass, StepKind, StepTimer
from surestep_scheduler.speculation.draft_length import Expected

from .timeline import RecentSteps, StepTimes


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
        budgets_s = self.timer.budgets_s(step_class)
        sent = Sent(step_class, now, budgets_s, known, self._busy, plan.rows.mode)
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
