"""Whole responses on their way to clients, bounded in time each and in total memory.

When a new response does not fit beside the others, the one that has been on its way for longest is
given up: slow readers lose, honest ones win.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from surestep_gateway.settings.config import GatewaySettings

_LARGEST_AT_ONCE = 4  # so many of the largest may be on their way
_LEAST_BYTES_PER_S = 64 << 10


class Answers:
    """The whole responses that one gateway is sending."""

    def __init__(self, settings: GatewaySettings) -> None:
        self._limit = _LARGEST_AT_ONCE * settings.max_answer_bytes
        self._send_timeout_s = settings.send_timeout_s
        self._sending: dict[asyncio.Timeout, int] = {}  # bytes of each, the oldest first

    @contextlib.asynccontextmanager
    async def sending(self, size: int) -> AsyncIterator[None]:
        """Account for a response of `size` bytes while it is sent.

        Raise TimeoutError when the client has had the timeout and a second for every 64 KiB, or
        when other responses need the room.
        """
        async with asyncio.timeout(self._send_timeout_s + size / _LEAST_BYTES_PER_S) as deadline:
            self._make_room(size)
            self._sending[deadline] = size
            try:
                yield
            finally:
                self._sending.pop(deadline, None)

    def _make_room(self, size: int) -> None:
        while self._sending and sum(self._sending.values()) + size > self._limit:
            slowest = next(iter(self._sending))
            del self._sending[slowest]
            with contextlib.suppress(RuntimeError):  # it is over already
                slowest.reschedule(0)
