"""The gateway process: start, serve, drain, stop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import Iterator

import uvicorn
from surestep_common.errors import Unavailable

from .app import make_app, make_gateway
from .config import GatewaySettings
from .context import Gateway
from .http_protocol import HttpProtocol

logger = logging.getLogger(__name__)

_BACKLOG = 2048
_CLOSE_S = 2  # for idle connections


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers: a drained gateway exits with status 0."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class GatewayServer:
    """A gateway on its socket."""

    def __init__(self, settings: GatewaySettings) -> None:
        """Raises Unavailable when the address is taken, InvalidRequest for a bad model folder."""
        self.gateway: Gateway = make_gateway(settings)
        self._socket = _bind(settings.host, settings.port)
        host, port = self._socket.getsockname()[:2]
        self.address = f"{host}:{port}"
        self.url = f"{'https' if settings.ssl_certfile else 'http'}://{self.address}"
        config = uvicorn.Config(
            make_app(self.gateway, self.address),
            loop="none",  # runs inside ours
            http=HttpProtocol,
            ws="none",
            lifespan="off",
            access_log=False,
            log_config=None,
            server_header=False,
            ssl_certfile=settings.ssl_certfile,
            ssl_keyfile=settings.ssl_keyfile,
            timeout_graceful_shutdown=_CLOSE_S,
            backlog=_BACKLOG,
        )
        self._server = _Server(config)
        self._stopping = asyncio.Event()

    def stop(self) -> None:
        """Drain and stop; called again, stop at once."""
        if self._stopping.is_set():
            self._server.should_exit = self._server.force_exit = True
        self._stopping.set()

    async def serve(self) -> None:
        """Until stopped."""
        try:
            async with asyncio.TaskGroup() as group:
                watcher = group.create_task(self.gateway.pool.run())
                drainer = group.create_task(self._drain_when_stopping())
                logger.info("listening on %s", self.url)
                await self._server.serve(sockets=[self._socket])
                watcher.cancel()
                drainer.cancel()
        finally:
            self._socket.close()
            await self.gateway.pool.close()

    async def _drain_when_stopping(self) -> None:
        await self._stopping.wait()
        logger.info("draining %d open requests", self.gateway.admission.num_open)
        await self.gateway.admission.drain()
        self._server.should_exit = True


def _bind(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise Unavailable(f"cannot listen on {host}:{port}: {error.strerror}") from error
    listener.setblocking(False)
    return listener


async def run(settings: GatewaySettings) -> None:
    """Serve until SIGTERM or SIGINT; a second signal does not wait for open requests."""
    server = GatewayServer(settings)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, server.stop)
    await server.serve()
