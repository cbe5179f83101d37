"""A tier, and the pauses that one gets which fails or is slow."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import ParamSpec, Protocol, TypeVar

from surestep_common.log import Sparingly

from .entry import Entry, Name

P = ParamSpec("P")
T = TypeVar("T")

_sparingly = Sparingly(logging.getLogger(__name__))

_SLOW_S = 2.0  # that one call may take
_REST_S = 15.0


class Tier(Protocol):
    """Entries of one identity, bounded; the one used longest ago goes first.

    Methods may be called from several threads. They raise OSError where the tier does not work.
    """

    label: str  # in WorkerInfo and logs

    def present(self, names: Sequence[Name]) -> list[bool]:
        """Return which entries are there, as far as is known without reading them."""

    def read(self, name: Name, nbytes: int) -> Entry | None:
        """Return an entry of `nbytes` of content, or None. Raises Refused for a wrong one."""

    def write(self, name: Name, entry: Entry) -> None:
        """Store an entry, in place of one of this name."""

    def remove(self, names: Sequence[Name]) -> None:
        """Remove entries, if they are there."""


class RestingTier:
    """Calls of a tier, which rests for a while when one has failed or takes too long.

    A disk that hangs keeps the threads that wait for it. Others do not join them.
    """

    def __init__(self, tier: Tier, clock: Callable[[], float] = time.monotonic) -> None:
        self.tier = tier
        self._clock = clock
        self._rests_until = 0.0
        self._begun = dict[int, float]()  # by thread

    @property
    def works(self) -> bool:
        """Return whether it may be called now."""
        now = self._clock()
        if any(now - begun > _SLOW_S for begun in list(self._begun.values())):
            self._rest(now, "a call takes too long")
        return now >= self._rests_until

    def call(self, otherwise: T, work: Callable[P, T], *args: P.args, **named: P.kwargs) -> T:
        """Return what a method of the tier returns, or `otherwise` where it rests or fails."""
        if not self.works:
            return otherwise
        thread, began = threading.get_ident(), self._clock()
        self._begun[thread] = began
        try:
            return work(*args, **named)
        except OSError as error:
            self._rest(self._clock(), str(error))
            return otherwise
        finally:
            del self._begun[thread]

    def _rest(self, now: float, why: str) -> None:
        if now >= self._rests_until:
            _sparingly.warning("the %s behind the KV cache rests: %s", self.tier.label, why)
        self._rests_until = now + _REST_S
