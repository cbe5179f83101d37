"""The open connections: idle ones make room for new ones, and every wait has a limit."""

from __future__ import annotations

import asyncio
import math
import time
from typing import Protocol

from surestep_gateway.observability.metrics import GatewayMetrics

_SWEEP_S = 0.5


class Connection(Protocol):
    """Connection, as the sweep sees it. Times are those of time.monotonic()."""

    def overdue(self, now: float) -> str | None:
        """Return why it must be closed now, as the metric's label; None if it need not."""

    def close(self) -> None:
        """Close it once everything sent has been read."""

    def abort(self) -> None:
        """Close it at once and drop what has not been sent."""


class Connections:
    def __init__(self, metrics: GatewayMetrics) -> None:
        self._metrics = metrics
        self._open: set[Connection] = set()
        self._idle: dict[Connection, None] = {}  # without a request, the longest waiting first

    def __len__(self) -> int:
        return len(self._open)

    def opened(self, connection: Connection) -> None:
        """Add a new connection, which is idle at first."""
        self._open.add(connection)
        self.idle(connection)

    def closed(self, connection: Connection) -> None:
        """Remove a connection."""
        self._open.discard(connection)
        self._idle.pop(connection, None)

    def idle(self, connection: Connection) -> None:
        """Mark a connection as having no open request."""
        self._idle.pop(connection, None)
        self._idle[connection] = None

    def busy(self, connection: Connection) -> None:
        """Mark a connection as serving a request, whose head has arrived."""
        self._idle.pop(connection, None)

    def close_idle(self) -> None:
        """Close the idle connections; their clients can connect again."""
        for connection in list(self._idle):
            connection.close()

    def make_room(self) -> bool:
        """Abort the connection that has been idle for longest; return whether there was one."""
        connection = next(iter(self._idle), None)
        if connection is None:
            return False
        self._metrics.connections_given_up.labels("room").inc()
        self.closed(connection)
        connection.abort()
        return True

    async def sweep(self) -> None:
        """Close overdue connections, until cancelled."""
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
    """Detects that a value has not changed for longer than a limit in seconds."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._value: int | None = None
        self._since = math.inf

    def stalled(self, value: int, now: float) -> bool:
        """Return whether `value` has been the same for too long, over the calls so far."""
        if value != self._value:
            self._value, self._since = value, now
        return now - self._since > self._limit_s
