"""The drafter's temperature: how much flatter or sharper than the request's its draws are.

Drafts are drawn with the noise of the tokens they guess, so a well calibrated drafter does best at
the request's own temperature. One that is too flat or too sharp does better at another. As the
output does not depend on it, the best factor is found by trial: most rows use the one that was
accepted most often lately, some try another.
"""

from __future__ import annotations

import numpy as np
from surestep_common.invariants import FloatArray, IntArray

FACTORS = (0.25, 0.5, 0.75, 1.0, 1.4, 2.0)
_FIRST = FACTORS.index(1.0)
_EXPLORE_EVERY = 8  # one window in so many tries another factor
_DECAY = 0.995  # weight of earlier windows, per window


class DraftTemperature:
    """Chooses a factor for every window. Deterministic: all ranks choose alike."""

    def __init__(self, num_slots: int, fixed: float | None = None) -> None:
        """Fit the factor, unless `fixed` gives it."""
        self._fixed = fixed
        self._choice = np.full(num_slots, _FIRST, dtype=np.int64)
        # A prior of a few windows, so that one lucky draft decides nothing; it favours 1.
        self._drafted = np.full(len(FACTORS), 32.0)
        self._accepted = np.full(len(FACTORS), 16.0)
        self._accepted[_FIRST] += 4.0
        self._windows = 0

    def choose(self, slots: IntArray) -> FloatArray:
        """Return factors f32[R] for the windows of slots [R]."""
        if self._fixed is not None:
            return np.full(len(slots), self._fixed, dtype=np.float32)
        turn = self._windows + np.arange(len(slots))
        self._windows += len(slots)
        other = turn // _EXPLORE_EVERY % len(FACTORS)
        self._choice[slots] = np.where(turn % _EXPLORE_EVERY == 0, other, self.best)
        return np.array(FACTORS, dtype=np.float32)[self._choice[slots]]

    def observe(self, slots: IntArray, n_drafts: IntArray, n_accepted: IntArray) -> None:
        """Learn from windows [R] of requests that sample: a rejected draft ends its window."""
        tried = np.minimum(n_accepted + 1, n_drafts)
        keep = _DECAY ** len(slots)
        self._drafted = self._drafted * keep + np.bincount(
            self._choice[slots], tried, minlength=len(FACTORS)
        )
        self._accepted = self._accepted * keep + np.bincount(
            self._choice[slots], n_accepted, minlength=len(FACTORS)
        )

    @property
    def best(self) -> int:
        """Return the index of the factor whose drafts were accepted most often lately."""
        return int((self._accepted / self._drafted).argmax())
