"""Losses of schedulers: which requests go on first, which are given up, which calls still begin.

A request that crashes its scheduler would crash it again wherever it is submitted. So one that was
open at several losses in a row without a token is resumed last, when all others have a token again,
and alone: one such request at a time. A loss during its isolation counts against it only if no
other request without a token was open there. A request that keeps losing schedulers alone is given
up, by name; one that was merely present gets a token, and its count starts again at zero.
"""

from __future__ import annotations

import asyncio
import logging
from enum import IntEnum

from surestep_common.errors import ModelFault, Unavailable

logger = logging.getLogger(__name__)

_IN_COMPANY = 2  # losses in a row without a token, before a request is tried alone
_ALONE = 2  # losses alone that are no coincidence
_THRESHOLD = 3  # failures in a row that open the circuit breaker
_PAUSE_S = 0.5  # before it lets a call through, doubled with every one that fails
_MAX_PAUSE_S = 30.0


class IsolationQueue:
    """Orders resumptions: requests lost for the first time first, suspects alone. One per
    gateway.
    """

    def __init__(self) -> None:
        self._turn = asyncio.Lock()
        self._others = 0  # that go on after a loss and have no token yet
        self._no_others = asyncio.Event()
        self._no_others.set()

    def goes_on(self) -> None:
        """Count a request that resumes after a loss."""
        self._others += 1
        self._no_others.clear()

    def went_on(self) -> None:
        """Uncount a request that has a token again, has ended, or waits for isolation."""
        self._others -= 1
        if not self._others:
            self._no_others.set()

    async def begin(self) -> None:
        """Wait for the isolated turn, behind all other resumptions; `end` releases it."""
        await self._turn.acquire()
        try:
            await self._no_others.wait()
        except BaseException:
            self._turn.release()
            raise

    def end(self) -> None:
        """Release the isolated turn."""
        self._turn.release()


class LossHistory:
    """The losses of schedulers at which one request was open."""

    def __init__(self, isolation: IsolationQueue, name: str, max_losses: int) -> None:
        """Allow `max_losses` that count, in a row without a token."""
        self._isolation = isolation
        self._name = name
        self._max_losses = max_losses
        self._losses = 0  # in a row, without a token, that count
        self._alone = 0  # of them, those alone
        self._goes_on = False  # as the queue counts it
        self._isolated = False

    async def turn(self) -> None:
        """Return when the request may be submitted."""
        if self._losses < _IN_COMPANY:
            return
        self._no_longer_goes_on()
        if not self._isolated:
            await self._isolation.begin()
            self._isolated = True
            logger.warning("%s is tried alone after %d losses", self._name, self._losses)

    def lost(self, error: Unavailable, *, alone: bool) -> None:
        """Record the loss of the scheduler. Raise `error` after too many, ModelFault for the cause.

        `alone`: it was the only request there that had no token yet.
        """
        if not self._isolated:
            self._losses += 1
        elif alone:
            self._losses += 1
            self._alone += 1
        self._end_isolation()  # others that were there come first again
        if self._alone and (self._alone >= _ALONE or self._losses > self._max_losses):
            what = f"this request was open at {self._losses} losses of its scheduler"
            logger.error("%s is given up: %s, at last alone", self._name, what)
            raise ModelFault(f"{what}, at last alone") from error
        if self._losses > self._max_losses:
            raise error
        if not self._goes_on and self._losses < _IN_COMPANY:
            self._goes_on = True
            self._isolation.goes_on()

    def token(self) -> None:
        """Record a token, which clears the request."""
        self._losses = self._alone = 0
        self.close()

    def close(self) -> None:
        """Stop making other requests wait."""
        self._no_longer_goes_on()
        self._end_isolation()

    def _no_longer_goes_on(self) -> None:
        if self._goes_on:
            self._goes_on = False
            self._isolation.went_on()

    def _end_isolation(self) -> None:
        if self._isolated:
            self._isolated = False
            self._isolation.end()


class BreakerState(IntEnum):
    """The values are those of the metric `surestep:circuit_breaker_state`."""

    CLOSED = 0  # every call may begin
    HALF_OPEN = 1  # one call may begin, to see whether it works again
    OPEN = 2  # no call may begin


class CircuitBreaker:
    """Keeps calls from a scheduler that keeps failing.

    Derives from its calls, numbered in the order they begin, which ones it may get.
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
