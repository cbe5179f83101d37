"""The open connections: those without a request make room for others, and none waits for ever."""

from __future__ import annotations

import asyncio
import math
import time
from typing import Protocol

from surestep_gateway.observability.metrics import GatewayMetrics

_SWEEP_S = 0.5


class Connection(Protocol):
    """What is asked of one connection. Times are those of time.monotonic()."""

    def overdue(self, now: float) -> str | None:
        """Why it must be given up now, as the metric's label says it."""

    def close(self) -> None:
        """End it when what was sent is taken."""

    def abort(self) -> None:
        """End it at once, whatever was not sent."""


class Connections:
    """Of one gateway."""

    def __init__(self, metrics: GatewayMetrics) -> None:
        self._metrics = metrics
        self._open: set[Connection] = set()
        self._idle: dict[Connection, None] = {}  # without a request, the longest waiting first

    def __len__(self) -> int:
        return len(self._open)

    def opened(self, connection: Connection) -> None:
        """A new one, which has not said anything yet."""
        self._open.add(connection)
        self.idle(connection)

    def closed(self, connection: Connection) -> None:
        """It is gone."""
        self._open.discard(connection)
        self._idle.pop(connection, None)

    def idle(self, connection: Connection) -> None:
        """Nobody waits for an answer on it any more."""
        self._idle.pop(connection, None)
        self._idle[connection] = None

    def busy(self, connection: Connection) -> None:
        """The head of a request has come."""
        self._idle.pop(connection, None)

    def close_idle(self) -> None:
        """End those without a request, in peace: whoever wants more connects again."""
        for connection in list(self._idle):
            connection.close()

    def make_room(self) -> bool:
        """End the connection that has been without a request for longest, if there is one."""
        connection = next(iter(self._idle), None)
        if connection is None:
            return False
        self._metrics.connections_given_up.labels("room").inc()
        self.closed(connection)
        connection.abort()
        return True

    async def sweep(self) -> None:
        """Give up what is overdue, until cancelled."""
        while True:
            await asyncio.sleep(_SWEEP_S)
            now = time.monotonic()
            for connection in list(self._open):
                reason = connection.overdue(now)
                if reason is None:
                    continue
                self._metrics.connections_given_up.labels(reason).inc()
                if reason == "send":
                    connection.abort()
                else:
                    connection.close()


class Progress:
    """Whether something goes on: False once its value has stood still for so many seconds."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._value: int | None = None
        self._since = math.inf

    def stalled(self, value: int, now: float) -> bool:
        """Whether `value` has been the same for too long, as often as this was asked."""
        if value != self._value:
            self._value, self._since = value, now
        return now - self._since > self._limit_s
