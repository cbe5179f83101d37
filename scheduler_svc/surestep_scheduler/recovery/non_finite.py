"""Logits that are not finite: a request that cannot be computed, or workers that cannot compute.

A request is computed again from nothing at its first failure, and fails at its second. When several
requests have their first failure within a few steps, the workers are at fault.
"""

from __future__ import annotations

from collections import deque

from surestep_common.errors import SurestepError

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

    def observe(self, num_requests: int, step: int) -> None:
        """Count requests that failed for the first time in a step.

        Raises NonFiniteLogits when the workers are to be replaced.
        """
        self._failures.extend([step] * num_requests)
        many = len(self._failures) == _REQUESTS and step - self._failures[0] < _WINDOW
        if num_requests and many and step >= self._trusted_until:
            self._trusted_until = step + _TRUST
            raise NonFiniteLogits(f"{_REQUESTS} requests met logits that were not finite")
