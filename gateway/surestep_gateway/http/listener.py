"""The listening socket and the open connections.

Connections are accepted up to a limit. Idle ones make room for new ones; every wait has a limit.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import math
import socket
import ssl
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import orjson
from surestep_common import addresses
from surestep_common.errors import Unavailable
from surestep_common.log import Sparingly

from surestep_gateway.http.errors import error_body
from surestep_gateway.observability.metrics import GatewayMetrics

_sparingly = Sparingly(logging.getLogger(__name__))

_BACKLOG = 2048
_BATCH = 16  # connections accepted before others have a turn
_PAUSE_S = 0.1  # when nothing can be accepted
_GONE = {errno.ECONNABORTED, errno.EPROTO, errno.EINTR}  # the client was quicker than we
_TCP_OPTIONS = {  # not every system has them all
    "TCP_KEEPIDLE": 60,  # seconds; a peer that has vanished is noticed
    "TCP_KEEPINTVL": 10,  # seconds
    "TCP_KEEPCNT": 3,
    "TCP_NOTSENT_LOWAT": 128 << 10,  # bytes the kernel holds for a client that reads nothing
}


def bind(host: str, port: int, send_timeout_s: float) -> socket.socket:
    """Return a bound socket, whose options accepted ones inherit.

    The kernel drops a peer that has vanished, and one that has read nothing for twice
    `send_timeout_s`; that also covers connections that are closed on our side and wait for their
    last bytes to be read. Raise Unavailable if the port is taken.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    options = _TCP_OPTIONS | {"TCP_USER_TIMEOUT": int(send_timeout_s * 2000)}
    for name, value in options.items():
        if (option := getattr(socket, name, None)) is not None:
            with contextlib.suppress(OSError):
                listener.setsockopt(socket.IPPROTO_TCP, option, value)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise Unavailable(f"cannot listen on {host}:{port}: {error.strerror}") from error
    listener.setblocking(False)
    return listener


def bind_path(path: Path) -> socket.socket:
    """Return a bound Unix socket, replacing one left by an earlier gateway. Raise Unavailable."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with addresses.binding(str(path)):
            if path.is_socket():
                path.unlink()
            listener.bind(str(path))
            listener.listen(_BACKLOG)  # now: others take a socket without a listener for abandoned
    except Unavailable:
        listener.close()
        raise
    except OSError as error:
        listener.close()
        raise Unavailable(f"cannot listen on {path}: {error.strerror or error}") from error
    listener.setblocking(False)
    return listener


class HttpListener:
    """Accepts connections itself: the event loop's own server hides lack of file descriptors."""

    def __init__(
        self,
        listener: socket.socket,
        make_protocol: Callable[[], asyncio.Protocol],
        connections: Connections,
        metrics: GatewayMetrics,
        *,
        limit: int,
        tls: ssl.SSLContext | None,
        handshake_s: float,
    ) -> None:
        """Keep at most `limit` connections open; `listener` is closed when `run` ends."""
        self._socket = listener
        self._make_protocol = make_protocol
        self._connections = connections
        self._metrics = metrics
        self._limit = limit
        self._tls = tls
        self._handshake_s = handshake_s if tls is not None else None
        self._opening: dict[asyncio.Task[None], None] = {}  # oldest first; with TLS: handshakes

    async def run(self) -> None:
        """Accept connections until cancelled."""
        self._socket.listen(_BACKLOG)
        try:
            async with asyncio.TaskGroup() as tasks:
                while True:
                    for _ in range(_BATCH):
                        connection = await self._accept()
                        if connection is not None:
                            task = tasks.create_task(self._open(connection))
                            self._opening[task] = None
                            task.add_done_callback(self._opened)
                    await asyncio.sleep(0)
        finally:
            self._socket.close()

    async def _accept(self) -> socket.socket | None:
        """Return a connection, None if there is no room for it."""
        try:
            connection, _ = await asyncio.get_running_loop().sock_accept(self._socket)
        except OSError as error:
            if error.errno not in _GONE:  # most likely there are no descriptors left, or no memory
                _sparingly.warning("cannot accept connections: %s", error.strerror)
                self._metrics.connections_refused.inc()
                self._make_room()
                await asyncio.sleep(_PAUSE_S)
            return None
        if len(self._connections) + len(self._opening) < self._limit or self._make_room():
            return connection
        _sparingly.warning("%d connections are open: another one is refused", self._limit)
        self._metrics.connections_refused.inc()
        _refuse(connection, in_clear=self._tls is None)
        return None

    def _make_room(self) -> bool:
        """Close a connection that has no request yet; return whether there was one."""
        if self._tls is None or not self._opening:
            return self._connections.make_room()
        task = next(iter(self._opening))
        self._opened(task)
        task.cancel()
        return True

    async def _open(self, connection: socket.socket) -> None:
        """Hand the connection to a new protocol, behind TLS where it is configured."""
        with contextlib.suppress(OSError, asyncio.CancelledError):
            await asyncio.get_running_loop().connect_accepted_socket(
                self._make_protocol,
                connection,
                ssl=self._tls,
                ssl_handshake_timeout=self._handshake_s,
            )
            return
        connection.close()

    def _opened(self, task: asyncio.Task[None]) -> None:
        self._opening.pop(task, None)


def _refuse(connection: socket.socket, *, in_clear: bool) -> None:
    """Send a short 503, as far as that is possible without waiting."""
    body = orjson.dumps(error_body(Unavailable("too many connections are open")))
    answer = (
        b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\n"
        b"content-length: %d\r\nretry-after: 1\r\nconnection: close\r\n\r\n%s" % (len(body), body)
    )
    with connection, contextlib.suppress(OSError):
        connection.setblocking(False)
        if in_clear:
            connection.send(answer)
        connection.shutdown(socket.SHUT_WR)
        connection.recv(1 << 16)  # bytes left unread would have the answer thrown away


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
