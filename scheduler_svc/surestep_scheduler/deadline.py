"""How long a step may take before its workers are given up for hung."""

from __future__ import annotations

from collections import deque

_MARGIN = 8.0  # times the expected duration
_WEIGHT = 0.1  # of the newest duration in the running mean
_WINDOW = 1000  # durations kept for the quantiles


class Recent:
    """The latest measurements of something, and their quantiles."""

    def __init__(self) -> None:
        self._values: deque[float] = deque(maxlen=_WINDOW)

    def add(self, value: float) -> None:
        """One more; the oldest is forgotten."""
        self._values.append(value)

    def quantile(self, fraction: float) -> float:
        """Quantile of the values kept; 0 before the first."""
        ordered = sorted(self._values)
        return ordered[int(fraction * (len(ordered) - 1))] if ordered else 0.0


class StepTimer:
    """Running means of step durations by the step's size, in powers of two tokens. All seconds."""

    def __init__(
        self, *, floor_s: float, ceiling_s: float, warmup_s: float, warmup_steps: int
    ) -> None:
        self._floor_s = floor_s
        self._ceiling_s = ceiling_s
        self._warmup_s = warmup_s
        self._warmup_steps = warmup_steps
        self._num_steps = 0  # of this epoch
        self._mean_s: dict[int, float] = {}  # by size class
        self.recent_s = Recent()

    def start_epoch(self) -> None:
        """The workers may be new, and slow at first."""
        self._num_steps = 0

    def budget_s(self, num_tokens: int) -> float:
        """Time for a step of this size: the warm-up's, or a multiple of what is expected."""
        if self._num_steps < self._warmup_steps or not self._mean_s:
            return max(self._warmup_s, self._floor_s)
        size = num_tokens.bit_length()
        known = min(self._mean_s, key=lambda other: (abs(other - size), other))
        expected_s = self._mean_s[known] * 2.0 ** max(size - known, 0)
        return min(max(_MARGIN * expected_s, self._floor_s), self._ceiling_s)

    def observe(self, num_tokens: int, duration_s: float) -> None:
        """A step of this size has finished."""
        self._num_steps += 1
        self.recent_s.add(duration_s)
        size = num_tokens.bit_length()
        mean_s = self._mean_s.get(size, duration_s)
        self._mean_s[size] = mean_s + _WEIGHT * (duration_s - mean_s)
