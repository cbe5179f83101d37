"""Costs of steps: as the workers measured them at their start, corrected by the steps since.

The measurement takes a moment, beside processes that start as well. What follows tells better how
steps of different sizes compare, which is what draft lengths depend on.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from surestep_common.invariants import IntArray

from .draft_length import StepCosts, rising

_MEMORY = 0.02  # weight of the newest step in what all steps have in common
_OWN_MEMORY = 0.05  # in what steps of its size have beyond that, or drafting has
_FIRST_WEIGHT = 4.0  # steps that the measurement counts for
_INTERRUPTED = 8.0  # times its cost: what took longer teaches nothing
_REBUILT = 16  # steps after which what was learnt is used
_SIZES = 4  # that are told apart, from a number of rows to its double


class Expected(NamedTuple):
    """Expected time of a step, in microseconds; 0 = not known."""

    us: float = 0.0
    draft_us: float = 0.0  # of these, for drafting


class Took(NamedTuple):
    """Time of a step that only decoded, on the first rank, in microseconds; 0 = not known."""

    step_us: float  # without drafting
    draft_us: float


class LearntCosts:
    """Costs, and how they are corrected.

    A machine that is busy slows all steps down alike, which is learnt soon and as one factor. What
    steps of one size have beyond it, or drafting has, is learnt slowly.
    """

    def __init__(self, measured: StepCosts) -> None:
        self.now = self._measured = measured
        numbers = np.arange(len(measured.step))
        self._size = np.rint(_SIZES * np.log2(np.maximum(numbers, 1))).astype(np.int64)
        self._common = self._built = 1.0  # of all costs; in `now`
        self._own = np.ones(int(self._size[-1]) + 1)  # of steps, by size
        self._seen = np.zeros(len(self._own))
        self._draft, self._drafts_seen = 1.0, 0.0
        self._steps = 0

    def of_step(self, len_before: IntArray, n_drafts: IntArray) -> float:
        """Return what a step of rows [R], of these lengths and so many drafts, should take."""
        tokens, context = self._shape(len_before, n_drafts)
        return float(self.now.step[tokens]) + self.now.per_context_token * context

    def _shape(self, len_before: IntArray, n_drafts: IntArray) -> tuple[int, float]:
        """Return the input rows of such a step, as many as there are costs for, and the tokens of
        context that they see."""
        tokens = min(len(n_drafts) + int(n_drafts.sum()), len(self._size) - 1)
        return tokens, float(len_before @ (n_drafts + 1))

    def observe(
        self, expected: Expected, took: Took, len_before: IntArray, n_drafts: IntArray
    ) -> None:
        """Learn from a step of rows [R], of these lengths and with so many drafts each."""
        tokens, context = self._shape(len_before, n_drafts)
        size, measured = self._size[tokens], self._measured
        alike_us = float(self._own[size] * measured.step[tokens])
        alike_us += measured.per_context_token * context
        untold = expected.draft_us > 0 and not took.draft_us  # a device may not tell it apart
        if untold or not 0 < took.step_us < _INTERRUPTED * self._common * alike_us:
            return
        self._common += _weight(self._steps, _MEMORY) * (took.step_us / alike_us - self._common)
        self._seen[size] += 1
        if size != self._seen.argmax():  # which is what the others are compared with
            beyond = took.step_us / (alike_us * self._common) - 1
            self._own[size] *= 1 + _weight(self._seen[size], _OWN_MEMORY) * beyond
        if expected.draft_us:
            beyond = took.draft_us * self._built / (expected.draft_us * self._common) - 1
            self._draft *= 1 + _weight(self._drafts_seen, _OWN_MEMORY) * beyond
            self._drafts_seen += 1
        self._steps += 1
        if self._steps % _REBUILT == 0:
            self._rebuild()

    def _rebuild(self) -> None:
        measured, self._built = self._measured, self._common
        self.now = StepCosts(
            rising(measured.step * self._own[self._size]) * self._common,
            measured.draft * self._draft * self._common,
            measured.per_context_token * self._common,
        )


def _weight(seen: float, least: float) -> float:
    """Weight of the newest observation in a running mean over `seen` earlier ones."""
    return max(least, 1 / (seen + _FIRST_WEIGHT))
