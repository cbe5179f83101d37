"""Estimates that draft lengths rest on: which drafts are accepted, and how often any are found.

A lookup costs little and finds nothing most of the time, so what it brings is the product of both.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from surestep_common.invariants import BoolArray, IntArray

from .draft_length import FloatArray

_MODEL_MEMORY = 256.0  # trials that a writer's estimate rests on
_FIRST_GUESS = 0.7  # acceptance before anything is known
_FIRST_WEIGHT = 16.0  # trials that the first guess counts for
_MODEL_WEIGHT = 8.0  # trials that its writer's estimate counts for in a request's
_FADE = 0.9  # weight of a request's earlier windows, per window


class AcceptanceStats(NamedTuple):
    """Acceptance of a request, carried from one tenancy to the next.

    A trial is a draft whose predecessors in the window were all accepted; a hit one that was too.
    """

    hits: float = 0.0  # faded
    trials: float = 0.0  # faded


class Writer(NamedTuple):
    """Author of a request's text: the model, or one of its adapters, which a drafter knows less."""

    number: int = 0  # place of the adapter, plus 1
    digest: str = ""  # of what the adapter computes


THE_MODEL = Writer()


class Estimates:
    """Acceptance of a kind of drafts: by slot, and of all requests of a writer."""

    def __init__(self, num_slots: int) -> None:
        self._digests = list[str]()  # by number of the writer
        self._writer_hits, self._writer_trials = np.zeros((2, 0))
        self._meet(THE_MODEL)
        self.clear(num_slots)

    def clear(self, num_slots: int) -> None:
        """Begin an epoch with empty slots; what is known of all requests stays."""
        self.hits = np.zeros(num_slots)
        self.trials = np.zeros(num_slots)
        self.writer = np.zeros(num_slots, dtype=np.int64)

    def admit(self, slot: int, known: AcceptanceStats, writer: Writer) -> None:
        """Start the estimate of a slot."""
        self.hits[slot], self.trials[slot] = known
        self.writer[slot] = writer.number
        self._meet(writer)

    def _meet(self, writer: Writer) -> None:
        """Make a guess about a writer that was not there before."""
        missing = max(1 + writer.number - len(self._digests), 0)
        self._digests += missing * ["?"]
        self._writer_hits = np.append(self._writer_hits, np.zeros(missing))
        self._writer_trials = np.append(self._writer_trials, np.ones(missing))
        if self._digests[writer.number] != writer.digest:
            self._digests[writer.number] = writer.digest
            self._writer_hits[writer.number] = _FIRST_GUESS * _FIRST_WEIGHT
            self._writer_trials[writer.number] = _FIRST_WEIGHT

    def stats(self, slot: int) -> AcceptanceStats:
        """Return what is known of a slot's request."""
        return AcceptanceStats(float(self.hits[slot]), float(self.trials[slot]))

    def of(self, slot: IntArray) -> FloatArray:
        """Return the probability for rows [R] from their windows, starting at the writers'."""
        prior = (_MODEL_WEIGHT * self._writer_hits / self._writer_trials)[self.writer[slot]]
        estimate: FloatArray = (self.hits[slot] + prior) / (self.trials[slot] + _MODEL_WEIGHT)
        return estimate

    def observe(self, slot: IntArray, hits: IntArray, trials: IntArray) -> None:
        """Learn from windows of rows [R]."""
        self.hits[slot] = _FADE * self.hits[slot] + hits
        self.trials[slot] = _FADE * self.trials[slot] + trials
        writer, count = self.writer[slot], len(self._digests)
        total = np.bincount(writer, trials, count)
        fade = 1 - np.minimum(total / _MODEL_MEMORY, 1.0)
        self._writer_hits = fade * self._writer_hits + np.bincount(writer, hits, count)
        self._writer_trials = fade * self._writer_trials + total


_HOPE, _HOPE_WEIGHT = 0.5, 4.0  # of lookups of a request that is not known, and how many they are
_LOOKUPS_FADE = 0.985  # weight of a request's earlier lookups, per lookup


class Finds:
    """Share of lookups that find anything, by slot.

    Each request begins with hope of its own: one that repeats another one finds much at once.
    """

    def __init__(self, num_slots: int) -> None:
        self.clear(num_slots)

    def clear(self, num_slots: int) -> None:
        """Begin an epoch with empty slots."""
        self._found, self._lookups = np.zeros((2, num_slots))

    def admit(self, slot: int) -> None:
        """Start the estimate of a slot."""
        self._found[slot] = self._lookups[slot] = 0.0

    def of(self, slot: IntArray) -> FloatArray:
        """Return the share for rows [R]."""
        found: FloatArray = self._found[slot] + _HOPE * _HOPE_WEIGHT
        return found / (self._lookups[slot] + _HOPE_WEIGHT)

    def observe(self, slot: IntArray, found: BoolArray) -> None:
        """Learn from lookups of rows [R]."""
        self._found[slot] = _LOOKUPS_FADE * self._found[slot] + found
        self._lookups[slot] = _LOOKUPS_FADE * self._lookups[slot] + 1
