"""Judge whether speculation pays: acceptance of requests and model, probes, and the alarm.

Acceptance is estimated from windows that were verified, apart for the model and each adapter. A
request that is given no drafts shows nothing about its own, so one is probed now and then; probes
may take a small share of the time. A drafter that fails the model altogether is suspended. Steps
take longer than the workers need by themselves, because scheduler and gateway have work to do too;
by how much is learnt as they run, and what steps cost the workers is learnt anew. All that
predicts; contests of steps with drafts and without have the last word, one on what the drafter
proposes and one on what is looked up.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from surestep_common.invariants import BoolArray, IntArray, ResultRows

from .contest import WITH_STATE, WITHOUT_STATE, Bar, Contest, Outlook
from .draft_length import (
    Bet,
    DraftChoice,
    Expected,
    Factors,
    FloatArray,
    LearntCosts,
    Lookups,
    Overhead,
    StepCosts,
    Took,
    draft_lengths,
)
from .estimates import THE_MODEL, AcceptanceStats, Estimates, Finds, Writer

logger = logging.getLogger(__name__)

_PROBE = 2  # drafts
_PROBE_SHARE = 0.005  # of the time
_LOOKUP_MEMORY = 0.05  # weight of the newest step in what lookups take
_LOOKUP_JUMP = 4.0  # times that, which is as much as a step may show: others were interrupted
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
        self.suspended = self.has_fault = False
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
            self.suspend(message % (self._hits, self._trials), step, fault=False)
        elif self.suspended:
            logger.info("speculation resumes: %d of %d hits", self._hits, self._trials)
            self.suspended, self._pause = False, _FIRST_PAUSE
        self._hits = self._trials = 0

    def suspend(self, reason: str, step: int, *, fault: bool = True) -> None:
        """Allow no drafts for a while, and only a trial after that.

        Without a `fault` it is the model's own text that is missed.
        """
        if not self.suspended:
            self.num_suspensions += 1
            logger.warning("speculation is suspended: %s", reason)
        self.suspended, self.has_fault = True, fault
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


class Source:
    """Drafts of one origin: how many of them are accepted, and whether they pay."""

    def __init__(self, bar: Bar) -> None:
        self.acceptance, self.contest = Estimates(0), Contest(bar)


class Key(NamedTuple):
    """Choice that is made for a batch."""

    source: Source
    hopeful: bool  # about what drafts cost


class Choices:
    """Choices of draft lengths, made when they are asked for, and kept for some steps of a batch:
    they take long beside a step of one row, and change little."""

    def __init__(self) -> None:
        self._made: dict[Key, DraftChoice] = {}
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

    def get(self, key: Key, make: Callable[[], DraftChoice]) -> DraftChoice:
        """Return what is kept, or what is made now."""
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]


class Speculation:
    """Estimates of acceptance and of costs. Steps are counted here, over all epochs.

    A drafter may look up what repeats itself first, or do nothing else. That costs a moment and the
    rows of what is found, and is right for other reasons: both sources have lengths, estimates and
    a contest of their own.
    """

    def __init__(self) -> None:
        self.alarm = Alarm()
        self.expected = Expected()  # of the newest step, overhead left out
        self.overhead = Overhead()
        self._choices = Choices()
        self.proposed, self.looked_up = Source(WITH_STATE), Source(WITHOUT_STATE)
        self.sources = {"proposed": self.proposed, "looked_up": self.looked_up}
        self.finds = Finds(0)
        self._lookup_us = 0.0  # of a step
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
        for source in self.sources.values():
            source.acceptance.clear(num_slots)
            source.contest.abandon()
        self.finds.clear(num_slots)
        self._choices.forget()

    def admit(self, slot: int, known: AcceptanceStats, writer: Writer = THE_MODEL) -> None:
        """Start the estimate of a slot from what is known of its request."""
        self.proposed.acceptance.admit(slot, known, writer)
        self.looked_up.acceptance.admit(slot, AcceptanceStats(), writer)
        self.finds.admit(slot)
        self._choices.forget()

    def release(self, slot: int) -> AcceptanceStats:
        """Return what is known of the request that leaves a slot."""
        return self.proposed.acceptance.stats(slot)

    def suspend(self, reason: str) -> None:
        """Allow no drafts for a while, as the drafter is at fault for something."""
        self.alarm.suspend(reason, self._step)

    @property
    def drafts_soon(self) -> bool:
        """Return whether a request that is being prefilled will probably draft."""
        return self.proposed.contest.drafts and self.alarm.allows(self._step)

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
            caps = caps * (self._of_adapters(slot) & (not self.alarm.has_fault))
        if not self._adaptive or self._costs is None or not caps.any():
            return Lengths(caps if self._proposes else none, caps if self._looks_up else none)
        batch = Batch(slot, caps, context, behind * self._has_state, num_tokens)
        self._choices.meet(batch, self._step)
        proposed = self._proposed(batch, self._costs.now) if self._proposes else none
        return Lengths(proposed, self._found(batch, self._costs.now) if self._looks_up else none)

    def _proposed(self, batch: Batch, costs: StepCosts) -> IntArray:
        """Return what the drafter should propose, and note what is expected of the step."""
        missing = int(batch.behind.sum())
        makes_up = missing > _MAKES_UP * int(batch.caps.sum() + len(batch.slot))
        catch_up_us = float(costs.draft[min(missing, len(costs.draft) - 1)]) * makes_up
        choice, bet = self._chosen(self.proposed, batch, catch_up_us)
        # Where it makes up for much, the step does not tell what drafting costs usually.
        us = choice.plain_us - self.overhead.us + choice.more_us
        self.expected = Expected(us, 0.0 if makes_up else choice.draft_us, bet)
        lengths = choice.lengths.copy()
        # Where the price is above 1, not even a draft that is accepted for certain would pay.
        if choice.price < 1 and bet.mark is None:
            self._probe(batch, lengths, costs)
        return lengths

    def _found(self, batch: Batch, costs: StepCosts) -> IntArray:
        """Return how many of the tokens that are found the rows [R] should draft, and note what is
        expected of them."""
        choice, bet = self._chosen(self.looked_up, batch, 0.0)
        us = self.expected.us if self._proposes else choice.plain_us - self.overhead.us
        self.expected = self.expected._replace(us=us, looked_up=bet)
        lengths = choice.lengths.copy()
        if choice.price < 1 and bet.mark is None:
            self._probe_lookups(batch, lengths, costs)
        return lengths

    def _chosen(self, source: Source, batch: Batch, catch_up_us: float) -> tuple[DraftChoice, Bet]:
        """Return the drafts of a source that its contest decides for, and what is predicted."""
        contest, rows = source.contest, len(batch.slot)

        def outlook(*, hopeful: bool) -> Outlook:
            choice = self._choice(Key(source, hopeful), batch)
            gain = contest.tokens * float(choice.tokens.sum()) / rows
            return Outlook(rows, choice.plain_us, choice.more_us, gain, catch_up_us)

        other = self.looked_up if source is self.proposed else self.proposed
        drafts, mark = contest.way(
            outlook(hopeful=False),
            lambda: outlook(hopeful=True),
            has_prompts=batch.num_tokens > rows,
            alone=not other.contest.in_trial,
        )
        choice = self._choice(Key(source, hopeful=drafts and not contest.drafts), batch)
        if not drafts:
            choice = choice.without_drafts()
        return choice, choice.bet(mark)

    def _choice(self, key: Key, batch: Batch) -> DraftChoice:
        return self._choices.get(key, lambda: self._choose(key, batch))

    def _choose(self, key: Key, batch: Batch) -> DraftChoice:
        """Return the best drafts of a source, as far as it is known or hoped what they cost."""
        assert self._costs is not None
        (source, hopeful), rows = key, len(batch.slot)
        contest, looked_up = source.contest, source is self.looked_up
        time = contest.hopeful(rows) if hopeful else contest.time(rows)
        return draft_lengths(
            source.acceptance.of(batch.slot),
            batch.caps,
            batch.context,
            num_tokens=batch.num_tokens,
            costs=self._costs.now,
            overhead_us=self.overhead.us,
            catches_up=self._has_state,
            lookups=Lookups(self.finds.of(batch.slot), self._lookup_us) if looked_up else None,
            factors=Factors(contest.tokens, time),
        )

    def _probe(self, batch: Batch, lengths: IntArray, costs: StepCosts) -> None:
        """Let the drafter propose for one of the rows [R] without drafts, if there is time for it.

        A drafter with state has to make up for what the request gained since it drafted last.
        """
        if self._credit_us < 2 * costs.draft[1]:
            return
        row = _least_known(
            self.proposed.acceptance.trials[batch.slot], (lengths == 0) & (batch.caps > 0)
        )
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
        cost_us = _rows_us(costs, batch.num_tokens + int(lengths.sum())) + self._lookup_us
        if self._credit_us < cost_us:
            return
        row = _least_known(
            self.looked_up.acceptance.trials[batch.slot], (lengths == 0) & (batch.caps > 0)
        )
        if row is not None:
            self._credit_us = 0.0
            self.expected = self.expected._replace(looked_up=Bet())
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
        free = rows.n_forced == 0
        own = free & (rows.n_looked_up == 0)  # not given by anything else
        if of_it.draft_us and not expected.draft_us and not n_drafts[own].any():
            took_us = min(of_it.draft_us, _LOOKUP_JUMP * self._lookup_us or of_it.draft_us)
            self._lookup_us += _LOOKUP_MEMORY * (took_us - self._lookup_us)
        self._learn(self.proposed, expected.proposed, own, rows.n_accepted, since_us)
        accepted = rows.n_accepted * (rows.n_looked_up > 0)
        self._learn(self.looked_up, expected.looked_up, free, accepted, since_us)

    @staticmethod
    def _learn(
        source: Source, bet: Bet, own: BoolArray, accepted: IntArray, since_us: float
    ) -> None:
        """Tell a contest what came of a bet in rows [R], of which only its `own` count."""
        if bet.mark is not None:
            source.contest.took(bet.mark, since_us, bet.more, clean=bool(own.all()))
        if bet.tokens is not None:
            source.contest.accepted(float(bet.tokens[own].sum()), int(accepted[own].sum()))

    def observe(
        self, slot: IntArray, drafts: IntArray, accepted: IntArray, looked_up: BoolArray
    ) -> None:
        """Learn from rows [R] that verified and accepted so many drafts."""
        if not (self._adaptive or self.alarm.suspended):
            return
        trials = accepted + (accepted < drafts)
        for source, rows in (
            (self.looked_up, (drafts > 0) & looked_up),
            (self.proposed, (drafts > 0) & ~looked_up),
        ):
            source.acceptance.observe(slot[rows], accepted[rows], trials[rows])
        rows = rows & ~self._of_adapters(slot)  # of the last source, the drafter
        self.alarm.observe(int(accepted[rows].sum()), int(trials[rows].sum()), self._step)

    def _of_adapters(self, slot: IntArray) -> BoolArray:
        """Return which rows [R] say nothing of the model: adapters learn apart, with costs."""
        said: BoolArray = (self.proposed.acceptance.writer[slot] > 0) & (self._costs is not None)
        return said


def _least_known(trials: FloatArray, among: BoolArray) -> int | None:
    """Return the row, of some of R, with the fewest trials."""
    rows = among.nonzero()[0]
    return int(rows[trials[rows].argmin()]) if len(rows) else None


def _rows_us(costs: StepCosts, reach: int) -> float:
    """Return what the rows of a probe cost in a step that has so many others."""
    return float(costs.step[reach + _PROBE] - costs.step[reach])
