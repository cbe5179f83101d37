"""Estimate the acceptance of drafts from windows that were verified."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from surestep_common.invariants import IntArray

from .draft_length import FloatArray

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
