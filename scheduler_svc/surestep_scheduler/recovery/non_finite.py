"""Logits that are not finite: a request that cannot be computed, or workers that cannot compute.

A request is computed again from nothing at its first failure, and fails at its second. When several
requests have their first failure within a few steps, the workers are at fault.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Seq

from surestep_common.errors import SurestepError

from surestep_scheduler.core.sequence import Sequence

_WINDOW = 16  # steps
_REQUESTS = 2  # that fail within the window
_TRUST = 1000  # steps for which workers that were replaced in vain, or not, are not replaced again


class NonFiniteLogits(SurestepError):
    """The workers compute nonsense for one request after the other."""


class NonFiniteWatch:
    """First failures of requests, over all epochs. Steps are numbered over all epochs too."""

    def __init__(self) -> None:
        self._failures: deque[int] = deque(maxlen=_REQUESTS)  # steps
        self._trusted_until = 0  # step

    def first_failures(self, seqs: Seq[Sequence], step: int) -> list[bool]:
        """Which of the requests that failed in a step have a second chance.

        Raises NonFiniteLogits when the workers are to be replaced; that is the chance then.
        """
        chances = [seq.num_non_finite == 0 for seq in seqs]
        for seq, chance in zip(seqs, chances, strict=True):
            seq.num_non_finite += 1
            self._failures.extend([step] * chance)
        many = len(self._failures) == _REQUESTS and step - self._failures[0] < _WINDOW
        if any(chances) and many and step >= self._trusted_until:
            self._trusted_until = step + _TRUST
            raise NonFiniteLogits(f"{_REQUESTS} requests met logits that were not finite")
        return chances
