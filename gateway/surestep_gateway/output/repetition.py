"""Output that repeats itself: a pattern of tokens at its end, several times in a row."""

from __future__ import annotations

import numpy as np
from surestep_common.invariants import IntArray

STOP_REASON = "repetition_detected"


class RepetitionDetector:
    """Finds what vLLM's `repetition_detection` describes. Time and memory of a token grow with the
    longest pattern alone: for each length it counts the tokens that equal the one so far before.
    """

    def __init__(self, min_size: int, max_size: int, min_count: int, *, min_tokens: int) -> None:
        """Patterns have `min_size` to `max_size` tokens; the first `min_tokens` end nothing."""
        self._sizes = np.arange(1, max_size + 1)
        self._enough = self._sizes * (min_count - 1)
        self._enough[: max(min_size, 1) - 1] = np.iinfo(np.int64).max
        self._latest = np.full(max_size, -1)  # token ids, the last one first
        self._equal: IntArray = np.zeros(max_size, dtype=np.int64)
        self._left = min_tokens

    def push(self, token_id: int) -> bool:
        """Return whether a pattern has come often enough with this token."""
        self._equal = np.where(self._latest == token_id, self._equal + 1, 0)
        self._latest[1:] = self._latest[:-1]
        self._latest[0] = token_id
        self._left -= 1
        return self._left < 0 and bool((self._equal >= self._enough).any())
