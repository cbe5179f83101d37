"""Judge whether speculation pays: acceptance of requests and model, probes, and the alarm.

Acceptance is estimated from windows that were verified. A request that is given no drafts shows
nothing about its own, so one is probed now and then; probes may take a small share of the time. A
model whose drafter fails altogether is suspended. Steps take longer than the workers need by
themselves, because scheduler and gateway have work to do too; by how much is learnt as they run,
and what steps cost the workers is learnt anew. All that predicts; a contest of steps with the
drafter and without it has the last word.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Literal, NamedTuple

import numpy as np
from surestep_common.invariants import BoolArray, IntArray, ResultRows

from .contest import Contest, Outlook
from .draft_length import (
    DraftChoice,
    Expected,
    Factors,
    FloatArray,
    LearntCosts,
    Overhead,
    StepCosts,
    Took,
    draft_lengths,
)

_MODEL_MEMORY = 256.0  # trials that the model's estimate rests on
_FIRST_GUESS = 0.7  # acceptance before anything is known
_FIRST_WEIGHT = 16.0  # trials that the first guess counts for
_MODEL_WEIGHT = 8.0  # trials that the model's estimate counts for in a request's
_FADE = 0.9  # weight of a request's earlier windows, per window


class AcceptanceStats(NamedTuple):
    """Acceptance of a request, carried from one tenancy to the next.

    A trial is a draft whose predecessors in the window were all accepted; a hit one that was too.
    """

    hits: float = 0.0  # faded
    trials: float = 0.0  # faded


class Estimates:
    """Acceptance of a kind of drafts: by slot, and of all requests."""

    def __init__(self, num_slots: int) -> None:
        self._model_hits, self._model_trials = _FIRST_GUESS * _FIRST_WEIGHT, _FIRST_WEIGHT
        self.clear(num_slots)

    def clear(self, num_slots: int) -> None:
        """Begin an epoch with empty slots; what is known of all requests stays."""
        self.hits = np.zeros(num_slots)
        self.trials = np.zeros(num_slots)

    def admit(self, slot: int, known: AcceptanceStats) -> None:
        """Start the estimate of a slot."""
        self.hits[slot], self.trials[slot] = known

    def stats(self, slot: int) -> AcceptanceStats:
        """Return what is known of a slot's request."""
        return AcceptanceStats(float(self.hits[slot]), float(self.trials[slot]))

    def of(self, slot: IntArray) -> FloatArray:
        """Return the probability for rows [R] from their windows, starting at the model's."""
        prior = _MODEL_WEIGHT * self._model_hits / self._model_trials
        estimate: FloatArray = (self.hits[slot] + prior) / (self.trials[slot] + _MODEL_WEIGHT)
        return estimate

    def observe(self, slot: IntArray, hits: IntArray, trials: IntArray) -> None:
        """Learn from windows of rows [R]."""
        self.hits[slot] = _FADE * self.hits[slot] + hits
        self.trials[slot] = _FADE * self.trials[slot] + trials
        total = int(trials.sum())
        fade = 1 - min(total / _MODEL_MEMORY, 1.0)
        self._model_hits = fade * self._model_hits + int(hits.sum())
        self._model_trials = fade * self._model_trials + total


logger = logging.getLogger(__name__)

_PROBE = 2  # drafts
_PROBE_SHARE = 0.005  # of the time
_KEPT = 4  # steps of the same rows for which a choice holds
_MAKES_UP = 2  # times what a step may commit: a drafter so far behind did not draft of late

_FLOOR = 0.03  # acceptance that only a broken drafter stays below
_WINDOW = 256  # trials until the alarm judges
_PROBATION = 64  # trials after a pause
_FIRST_PAUSE = 1000  # steps
_LONGEST_PAUSE = 64_000  # steps


class Alarm:
    """Suspends speculation when acceptance has collapsed, and tries again after longer pauses."""

    def __init__(self) -> None:
        self.suspended = False
        self.num_suspensions = 0
        self._hits = self._trials = 0
        self._pause = _FIRST_PAUSE
        self._until = 0  # step

    def allows(self, step: int) -> bool:
        """Return whether drafts may be planned: all is well, or a pause is over."""
        return step >= self._until

    def observe(self, hits: int, trials: int, step: int) -> None:
        """Judge after enough trials. Those planned before a pause do not count."""
        if not self.allows(step):
            return
        self._hits += hits
        self._trials += trials
        if self._trials < (_PROBATION if self.suspended else _WINDOW):
            return
        if self._hits < _FLOOR * self._trials:
            message = "%d of the last %d drafts were accepted; is this the model's drafter?"
            self.suspend(message % (self._hits, self._trials), step)
        elif self.suspended:
            logger.info("speculation resumes: %d of %d hits", self._hits, self._trials)
            self.suspended, self._pause = False, _FIRST_PAUSE
        self._hits = self._trials = 0

    def suspend(self, reason: str, step: int) -> None:
        """Allow no drafts for a while, and only a trial after that."""
        if not self.suspended:
            self.num_suspensions += 1
            logger.warning("speculation is suspended: %s", reason)
        self.suspended = True
        self._hits = self._trials = 0
        self._until = step + self._pause
        self._pause = min(2 * self._pause, _LONGEST_PAUSE)


class Lengths(NamedTuple):
    """Drafts of rows [R] of a step, at most."""

    proposed: IntArray  # by the drafter
    looked_up: IntArray  # before it is asked


class Batch(NamedTuple):
    """Rows [R] of a step that decode, and the input rows of the step without drafts."""

    slot: IntArray
    caps: IntArray  # most drafts
    context: IntArray  # tokens
    behind: IntArray  # tokens that the drafter's state lacks
    num_tokens: int


Kind = Literal["best", "hopeful", "found"]


class Choices:
    """Choices of draft lengths, made when they are asked for, and kept for some steps of a batch:
    they take long beside a step of one row, and change little."""

    def __init__(self) -> None:
        self._made: dict[Kind, DraftChoice] = {}
        self._batch: tuple[bytes, bytes, int] | None = None
        self._until = 0  # step

    def meet(self, batch: Batch, step: int) -> None:
        """Forget what is old or of another batch."""
        key = batch.slot.tobytes(), batch.caps.tobytes(), batch.num_tokens
        if key != self._batch or step >= self._until:
            self._made.clear()
            self._batch, self._until = key, step + _KEPT

    def forget(self) -> None:
        """Forget all: a slot has another request."""
        self._batch = None

    def get(self, kind: Kind, make: Callable[[], DraftChoice]) -> DraftChoice:
        """Return what is kept, or what is made now."""
        if kind not in self._made:
            self._made[kind] = make()
        return self._made[kind]


class Speculation:
    """Estimates of acceptance and of costs. Steps are counted here, over all epochs.

    A drafter may look up what repeats itself first, or do nothing else. That costs nothing but the
    rows of what is found, and is right for other reasons: both have lengths and estimates of their
    own, and the contest is of what a drafter proposes.
    """

    def __init__(self) -> None:
        self.alarm = Alarm()
        self.expected = Expected()  # of the newest step, overhead left out
        self.overhead = Overhead()
        self.contest = Contest()
        self._choices = Choices()
        self.proposed, self.looked_up = Estimates(0), Estimates(0)
        self._credit_us = 0.0  # time that probes may take
        self._step = 0

    def reset(
        self,
        num_slots: int,
        costs: StepCosts | None,
        *,
        adaptive: bool,
        drafter_has_state: bool,
        drafter_looks_up: bool,
    ) -> None:
        """Begin an epoch with empty slots.

        Lengths are chosen where they are `adaptive` and the workers measured `costs`; else every
        row drafts as much as it may.
        """
        self._adaptive, self._has_state = adaptive, drafter_has_state
        self._looks_up = drafter_looks_up
        self._proposes = drafter_has_state or not drafter_looks_up
        self._costs = LearntCosts(costs) if costs is not None else None
        self.proposed.clear(num_slots)
        self.looked_up.clear(num_slots)
        self.contest.abandon()
        self._choices.forget()

    def admit(self, slot: int, known: AcceptanceStats) -> None:
        """Start the estimate of a slot from what is known of its request."""
        self.proposed.admit(slot, known)
        self.looked_up.admit(slot, AcceptanceStats())
        self._choices.forget()

    def release(self, slot: int) -> AcceptanceStats:
        """Return what is known of the request that leaves a slot."""
        return self.proposed.stats(slot)

    def suspend(self, reason: str) -> None:
        """Allow no drafts for a while, as the drafter is at fault for something."""
        self.alarm.suspend(reason, self._step)

    @property
    def drafts_soon(self) -> bool:
        """Return whether a request that is being prefilled will probably draft."""
        return self.contest.drafts and self.alarm.allows(self._step)

    def lengths(
        self, slot: IntArray, caps: IntArray, context: IntArray, behind: IntArray, num_tokens: int
    ) -> Lengths:
        """Choose the drafts of the rows [R] of a step, at most `caps` each.

        `behind` is by how many tokens the drafter's state is behind each row.
        """
        self._step += 1
        self._credit_us += _PROBE_SHARE * (self.expected.us + self.overhead.us)  # of the last step
        self.expected = Expected()
        none = np.zeros_like(caps)
        if not self.alarm.allows(self._step):
            return Lengths(none, none)
        if not self._adaptive or self._costs is None or not caps.any():
            return Lengths(caps if self._proposes else none, caps if self._looks_up else none)
        batch = Batch(slot, caps, context, behind * self._has_state, num_tokens)
        self._choices.meet(batch, self._step)
        if not self._proposes:
            self.expected = Expected(self._choice("found", batch).plain_us - self.overhead.us)
            return Lengths(none, self._found(batch, self._costs.now))
        proposed = self._proposed(batch, self._costs.now)
        lengths = proposed.lengths.copy()
        # Where the price is above 1, not even a draft that is accepted for certain would pay.
        if proposed.price < 1 and self.expected.mark is None:
            self._probe(batch, lengths, self._costs.now)
        return Lengths(lengths, self._found(batch, self._costs.now) if self._looks_up else none)

    def _found(self, batch: Batch, costs: StepCosts) -> IntArray:
        """Return how many of the tokens that are found the rows [R] should draft."""
        found = self._choice("found", batch).if_worthwhile()
        lengths = found.lengths.copy()
        if found.price < 1:
            self._probe_lookups(batch, lengths, costs)
        return lengths

    def _choice(self, kind: Kind, batch: Batch) -> DraftChoice:
        """Return the best drafts that are looked up, or of the drafter, as far as it is known or as
        it is hoped what they cost."""
        return self._choices.get(kind, lambda: self._choose(kind, batch))

    def _choose(self, kind: Kind, batch: Batch) -> DraftChoice:
        assert self._costs is not None
        rows, contest, looked_up = len(batch.slot), self.contest, kind == "found"
        time = contest.hopeful(rows) if kind == "hopeful" else contest.time(rows)
        estimates = self.looked_up if looked_up else self.proposed
        return draft_lengths(
            estimates.of(batch.slot),
            batch.caps,
            batch.context,
            num_tokens=batch.num_tokens,
            costs=self._costs.now,
            overhead_us=self.overhead.us,
            catches_up=self._has_state,
            looked_up=looked_up,
            factors=Factors() if looked_up else Factors(contest.tokens, time),
        )

    def _proposed(self, batch: Batch, costs: StepCosts) -> DraftChoice:
        """Return what the drafter should propose, and note what is expected of the step."""
        contest, rows, missing = self.contest, len(batch.slot), int(batch.behind.sum())
        makes_up = missing > _MAKES_UP * int(batch.caps.sum() + rows)
        catch_up_us = float(costs.draft[min(missing, len(costs.draft) - 1)]) * makes_up

        def outlook(kind: Kind) -> Outlook:
            choice = self._choice(kind, batch)
            gain = contest.tokens * float(choice.tokens.sum()) / rows
            return Outlook(rows, choice.plain_us, choice.more_us, gain, catch_up_us)

        drafts, mark = contest.way(
            outlook("best"), lambda: outlook("hopeful"), has_prompts=batch.num_tokens > rows
        )
        choice = self._choice("hopeful" if drafts and not contest.drafts else "best", batch)
        if not drafts:
            choice = choice.without_drafts()
        self.expected = choice.expected(self.overhead.us, mark)
        if makes_up:  # of what drafting costs usually it tells nothing
            self.expected = self.expected._replace(draft_us=0.0)
        return choice

    def _probe(self, batch: Batch, lengths: IntArray, costs: StepCosts) -> None:
        """Let the drafter propose for one of the rows [R] without drafts, if there is time for it.

        A drafter with state has to make up for what the request gained since it drafted last.
        """
        if self._credit_us < 2 * costs.draft[1]:
            return
        row = _least_known(self.proposed.trials[batch.slot], (lengths == 0) & (batch.caps > 0))
        if row is None:
            return
        missing = min(1 + int(batch.behind[row]), len(costs.draft) - 1)
        drafting_us = costs.draft[missing] + costs.draft[1]
        cost_us = drafting_us + _rows_us(costs, batch.num_tokens + int(lengths.sum()))
        if self._credit_us >= cost_us:
            self._credit_us = 0.0
            # Of what drafting costs usually it tells nothing: most of it is making up.
            self.expected = Expected(self.expected.us + float(cost_us))
            lengths[row] = min(int(batch.caps[row]), _PROBE)

    def _probe_lookups(self, batch: Batch, lengths: IntArray, costs: StepCosts) -> None:
        """The same with what is looked up."""
        cost_us = _rows_us(costs, batch.num_tokens + int(lengths.sum()))
        if self._credit_us < cost_us:
            return
        row = _least_known(self.looked_up.trials[batch.slot], (lengths == 0) & (batch.caps > 0))
        if row is not None:
            self._credit_us = 0.0
            lengths[row] = min(int(batch.caps[row]), _PROBE)

    def took(
        self, expected: Expected, us: float, since_us: float, of_it: Took, rows: ResultRows
    ) -> None:
        """Learn from what a step of rows [R] without prompts took, in all and the workers, and how
        long after the one before it came to an end."""
        if self._costs is None:
            return
        len_before, n_drafts = rows.len_before, rows.n_drafts
        step_us = self._costs.of_step(len_before, n_drafts)
        self.overhead.observe(step_us + expected.draft_us, us)
        self._costs.observe(expected, of_it, len_before, n_drafts)
        own = (rows.n_looked_up == 0) & (rows.n_forced == 0)  # not given by anything else
        if expected.mark is not None:
            self.contest.took(expected.mark, since_us, expected.more, clean=bool(own.all()))
        if expected.tokens is not None:
            predicted = float(expected.tokens[own].sum())
            self.contest.accepted(predicted, int(rows.n_accepted[own].sum()))

    def observe(
        self, slot: IntArray, drafts: IntArray, accepted: IntArray, looked_up: BoolArray
    ) -> None:
        """Learn from rows [R] that verified and accepted so many drafts."""
        if not (self._adaptive or self.alarm.suspended):
            return
        trials = accepted + (accepted < drafts)
        for estimates, rows in (
            (self.looked_up, (drafts > 0) & looked_up),
            (self.proposed, (drafts > 0) & ~looked_up),
        ):
            estimates.observe(slot[rows], accepted[rows], trials[rows])
        self.alarm.observe(int(accepted[rows].sum()), int(trials[rows].sum()), self._step)


def _least_known(trials: FloatArray, among: BoolArray) -> int | None:
    """Return the row, of some of R, with the fewest trials."""
    rows = among.nonzero()[0]
    return int(rows[trials[rows].argmin()]) if len(rows) else None


def _rows_us(costs: StepCosts, reach: int) -> float:
    """Return what the rows of a probe cost in a step that has so many others."""
    return float(costs.step[reach + _PROBE] - costs.step[reach])
