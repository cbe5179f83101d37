"""Whether speculation pays: running acceptance of requests and model, probes, and the alarm.

A request that is given no drafts shows nothing about its acceptance, so it is probed now and then,
less often with every probe in vain. A model whose drafter fails altogether is suspended.
"""

from __future__ import annotations

import logging
from typing import NamedTuple

import numpy as np
from surestep_common.invariants import BoolArray, IntArray

from .draft_length import FloatArray, draft_lengths
from .limits import Limits

logger = logging.getLogger(__name__)

_MODEL_MEMORY = 256.0  # trials that the model's estimate rests on
_FIRST_GUESS = 0.7  # acceptance before anything is known
_FIRST_WEIGHT = 16.0  # trials that the first guess counts for
_MODEL_WEIGHT = 8.0  # trials that the model's estimate counts for in a request's
_FADE = 0.9  # weight of a request's earlier windows, per window
_FIRST_WAIT = 16  # steps between probes
_LONGEST_WAIT = 4096  # steps
_PROBE = 2  # drafts

_FLOOR = 0.03  # acceptance that only a broken drafter stays below
_WINDOW = 256  # trials until the alarm judges
_PROBATION = 64  # trials after a pause
_FIRST_PAUSE = 1000  # steps
_LONGEST_PAUSE = 64_000  # steps


class Experience(NamedTuple):
    """What is known of a request, carried from one tenancy to the next.

    A trial is a draft whose predecessors in the window were all accepted; a hit one that was too.
    """

    hits: float = 0.0  # faded
    trials: float = 0.0  # faded
    wait: int = _FIRST_WAIT  # steps until the next probe


class Alarm:
    """Suspends speculation when acceptance has collapsed, and tries again after longer pauses."""

    def __init__(self) -> None:
        self.suspended = False
        self.num_suspensions = 0
        self._hits = self._trials = 0
        self._pause = _FIRST_PAUSE
        self._until = 0  # step

    def allows(self, step: int) -> bool:
        """Drafts may be planned: all is well, or a pause is over."""
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
            self._suspend(step)
        elif self.suspended:
            logger.info("speculation goes on: %d of %d hits", self._hits, self._trials)
            self.suspended, self._pause = False, _FIRST_PAUSE
        self._hits = self._trials = 0

    def _suspend(self, step: int) -> None:
        if not self.suspended:
            self.num_suspensions += 1
            logger.warning(
                "speculation is suspended: %d of the last %d drafts were accepted; is this the "
                "model's drafter?",
                self._hits,
                self._trials,
            )
        self.suspended = True
        self._until = step + self._pause
        self._pause = min(2 * self._pause, _LONGEST_PAUSE)


class Speculation:
    """Estimates by slot, and of the model. Steps are counted here, over all epochs."""

    def __init__(self) -> None:
        self.alarm = Alarm()
        self.pays = True  # the newest decision gave drafts to somebody
        self._step = 0
        self._hits = _FIRST_GUESS * _FIRST_WEIGHT
        self._trials = _FIRST_WEIGHT

    def reset(self, limits: Limits) -> None:
        """An epoch begins: no slot is taken."""
        self._limits = limits
        self.hits = np.zeros(limits.num_slots)
        self.trials = np.zeros(limits.num_slots)
        self.wait = np.zeros(limits.num_slots, dtype=np.int64)

    def admit(self, slot: int, known: Experience) -> None:
        """A tenancy begins."""
        self.hits[slot], self.trials[slot], self.wait[slot] = known

    def release(self, slot: int) -> Experience:
        """A tenancy ends."""
        return Experience(float(self.hits[slot]), float(self.trials[slot]), int(self.wait[slot]))

    @property
    def expected(self) -> bool:
        """A request that is being prefilled will probably draft."""
        return self.pays and self.alarm.allows(self._step)

    def lengths(
        self, slot: IntArray, caps: IntArray, context: IntArray, num_tokens: int
    ) -> IntArray:
        """Drafts of the rows [R] of a step: at most `caps`; see `draft_lengths`."""
        self._step += 1
        limits = self._limits
        if not limits.adaptive_draft_length or not caps.any():
            return caps
        if not self.alarm.allows(self._step):
            return np.zeros_like(caps)
        if limits.costs is None:
            return caps
        choice = draft_lengths(
            self._acceptance(slot),
            caps,
            context,
            num_tokens=num_tokens,
            costs=limits.costs,
            catches_up=limits.drafter_has_state,
        )
        self.pays = bool(choice.lengths.any())
        if choice.price >= 1:  # not even a draft that is accepted for certain
            return choice.lengths
        probed = self._probe(slot, choice.lengths > 0)
        return np.where(probed, np.minimum(caps, _PROBE), choice.lengths)

    def _probe(self, slot: IntArray, chosen: BoolArray) -> BoolArray:
        """Which rows [R] are given drafts although these would not be `chosen` for their sake.

        Waits are powers of two, so that the probes of many requests share their steps.
        """
        wait = self.wait[slot]
        probed: BoolArray = ~chosen & (self._step % wait == 0)
        longer = np.where(probed, np.minimum(2 * wait, _LONGEST_WAIT), wait)
        self.wait[slot] = np.where(chosen, _FIRST_WAIT, longer)
        return probed

    def _acceptance(self, slot: IntArray) -> FloatArray:
        """Estimate for rows [R]: their own experience, beginning from the model's."""
        prior = _MODEL_WEIGHT * self._hits / self._trials
        estimate: FloatArray = (self.hits[slot] + prior) / (self.trials[slot] + _MODEL_WEIGHT)
        return estimate

    def observe(self, slot: IntArray, drafts: IntArray, accepted: IntArray) -> None:
        """Rows [R] verified and accepted so many drafts."""
        if not self._limits.adaptive_draft_length:
            return
        tried = drafts.nonzero()[0]
        slot, hits = slot[tried], accepted[tried]
        trials = hits + (hits < drafts[tried])
        self.hits[slot] = _FADE * self.hits[slot] + hits
        self.trials[slot] = _FADE * self.trials[slot] + trials
        self.wait[slot[hits > 0]] = _FIRST_WAIT
        total = int(trials.sum())
        fade = 1 - min(total / _MODEL_MEMORY, 1.0)
        self._hits = fade * self._hits + int(hits.sum())
        self._trials = fade * self._trials + total
        self.alarm.observe(int(hits.sum()), total, self._step)
