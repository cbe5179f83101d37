"""A circuit breaker, which keeps calls from a scheduler that keeps failing."""

from __future__ import annotations

from enum import IntEnum

_THRESHOLD = 3  # failures in a row that open the circuit breaker
_PAUSE_S = 0.5  # before it lets a call through, doubled with every one that fails
_MAX_PAUSE_S = 30.0


class BreakerState(IntEnum):
    """The values are those of the metric `surestep:circuit_breaker_state`."""

    CLOSED = 0  # every call may begin
    HALF_OPEN = 1  # one call may begin, to see whether it works again
    OPEN = 2  # no call may begin


class CircuitBreaker:
    """Derives from a scheduler's calls, numbered in the order they begin, which ones it may get.

    Pure: the clock is an argument. A call counts only if it began after the last failure: the many
    calls that one crash ends are one failure, and tokens that were still in flight are no recovery.
    """

    def __init__(self) -> None:
        self._failures = 0  # in a row
        self._calls = 0  # begun so far
        self._relevant = 1  # number of the first call that began after the last failure
        self._probe: int | None = None  # number of the call that is let through while HALF_OPEN
        self._open_until = 0.0

    def state(self, now: float) -> BreakerState:
        """Return the state at `now`, in seconds of any clock that never goes back."""
        if self._failures < _THRESHOLD:
            return BreakerState.CLOSED
        return BreakerState.OPEN if now < self._open_until else BreakerState.HALF_OPEN

    def admits(self, now: float) -> bool:
        """Return whether a call may begin."""
        match self.state(now):
            case BreakerState.CLOSED:
                return True
            case BreakerState.HALF_OPEN:
                return self._probe is None
            case BreakerState.OPEN:
                return False

    def waits_s(self, now: float) -> float | None:
        """Return the seconds until calls are admitted again; None if that does not depend on
        time.
        """
        return self._open_until - now if self.state(now) is BreakerState.OPEN else None

    def begin(self, now: float) -> int:
        """Record that a call begins and return its number."""
        self._calls += 1
        if self.state(now) is not BreakerState.CLOSED:
            self._probe = self._calls
        return self._calls

    def worked(self, call: int) -> None:
        """Record that the call delivered tokens."""
        if self._failures and call >= self._relevant:
            self._failures = 0
            self._probe = None

    def failed(self, call: int, now: float) -> None:
        """Record that the call was lost, or ended by an internal error of the scheduler."""
        if call < self._relevant:
            return
        self._failures += 1
        self._relevant = self._calls + 1
        self._probe = None
        doublings = max(0, self._failures - _THRESHOLD)
        self._open_until = now + min(_MAX_PAUSE_S, _PAUSE_S * 2.0 ** min(doublings, 16))

    def ended(self, call: int) -> None:
        """Record an end that is no evidence either way: cancelled, refused, or timed out."""
        if self._probe == call:
            self._probe = None
