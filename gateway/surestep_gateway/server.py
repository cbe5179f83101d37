"""The gateway process: wait for the model's folder, start, serve, drain, stop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import ssl
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from urllib.parse import quote

import uvicorn
from surestep_common.notify import Notifier
from surestep_common.process import clients_within, raise_file_limit

from surestep_gateway.apis.responses.store import open_store
from surestep_gateway.app import make_app, make_models
from surestep_gateway.http.certificates import CertificateWatch
from surestep_gateway.http.http_protocol import ClientTimeouts, HttpProtocol
from surestep_gateway.http.listener import Connections, HttpListener, bind, bind_path
from surestep_gateway.schedulers.residency import Residency, Resident
from surestep_gateway.settings.config import GatewaySettings

logger = logging.getLogger(__name__)

HEAD_TIMEOUT_S = 10.0  # for a head, and for a TLS handshake
_CLOSE_S = 2  # for idle connections
_POLL_S = 0.5  # for the model's folder
_POLLS_PER_WORD = 120  # a minute


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers and listeners: a drained gateway exits with status 0."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Skip uvicorn's own listening; `HttpListener` accepts the connections."""
        self.servers = []
        self.started = True


class GatewayServer:
    """A gateway that listens on its socket."""

    def __init__(self, settings: GatewaySettings) -> None:
        """Raise Unavailable when the address is taken, InvalidRequest for a bad model folder."""
        self.models = make_models(settings.each)
        self.gateway = self.models.first
        residents = (
            Resident(one.pool, one.settings.unload_idle_s, one.settings.unload_level)
            for one in self.models.all
        )
        self._residency = Residency([*residents], settings.max_loaded_models)
        self._store = open_store(settings)
        listening, self.address, self.url = _listen(settings)
        self._connections = Connections(self.gateway.metrics)
        self._timeouts = ClientTimeouts(
            head_s=HEAD_TIMEOUT_S,
            keep_alive_s=settings.timeout_keep_alive,
            send_s=settings.send_timeout_s,
        )
        config = uvicorn.Config(
            make_app(self.models, self._store, self.address),
            loop="none",  # runs inside ours
            ws="none",
            lifespan="off",
            access_log=False,
            log_config=None,
            log_level="error",  # clients can cause warnings at will
            server_header=False,
            ssl_certfile=settings.ssl_certfile,
            ssl_keyfile=settings.ssl_keyfile,
            # Health checks need no certificate, so that the handshake cannot insist on one.
            ssl_cert_reqs=min(settings.ssl_cert_reqs, ssl.CERT_OPTIONAL),
            ssl_ca_certs=str(settings.ssl_ca_certs) if settings.ssl_ca_certs else None,
            ssl_ciphers=settings.ssl_ciphers,
            timeout_keep_alive=settings.timeout_keep_alive,
            timeout_graceful_shutdown=_CLOSE_S,
        )
        config.load()
        self._server = _Server(config)
        self._listener = HttpListener(
            listening,
            self._new_protocol,
            self._connections,
            self.gateway.metrics,
            limit=_most_connections(settings.max_connections),
            tls=config.ssl,
            handshake_s=HEAD_TIMEOUT_S,
        )
        self._certificates = CertificateWatch(config.ssl, settings)
        self._stopping = asyncio.Event()

    def _new_protocol(self) -> HttpProtocol:
        return HttpProtocol(
            self._connections,
            self._timeouts,
            config=self._server.config,
            server_state=self._server.server_state,
            app_state={},
        )

    def stop(self) -> None:
        """Drain and stop; called again, stop at once."""
        if self._stopping.is_set():
            self._server.should_exit = self._server.force_exit = True
        self._stopping.set()

    async def serve(self) -> None:
        """Serve until stopped."""
        try:
            async with asyncio.TaskGroup() as group:
                listening = group.create_task(self._listener.run())
                tasks = [
                    listening,
                    *(group.create_task(one.pool.run()) for one in self.models.all),
                    group.create_task(self._connections.sweep()),
                    group.create_task(self._certificates.run()),
                    group.create_task(Notifier().beat()),
                    group.create_task(self.gateway.text_pool.run()),
                    group.create_task(self._residency.run()),
                    group.create_task(self.gateway.metrics.event_loop.watch()),
                    group.create_task(self.gateway.metrics.clients.watch()),
                    group.create_task(self._drain_when_stopping(listening)),
                ]
                logger.info("listening on %s", self.url)
                await self._server.serve()
                for task in tasks:
                    task.cancel()
        finally:
            for one in self.models.all:
                one.text.close()
                await one.pool.close()
            await self._store.close()
            await self.gateway.tracer.close()

    async def _drain_when_stopping(self, listening: asyncio.Task[None]) -> None:
        await self._stopping.wait()
        await self.gateway.admission.leave()
        self._connections.close_idle()
        logger.info("draining %d open requests", self.gateway.admission.num_open)
        await self.gateway.admission.drain()
        listening.cancel()
        self._server.should_exit = True


def _listen(settings: GatewaySettings) -> tuple[socket.socket, str, str]:
    """Return the socket, its address for display, and its URL. Raise Unavailable."""
    if settings.uds is not None:
        address = str(settings.uds)
        return bind_path(settings.uds), address, f"unix://{quote(address, safe='')}"
    listening = bind(settings.host, settings.port, settings.send_timeout_s)
    host, port = listening.getsockname()[:2]
    scheme = "https" if settings.ssl_certfile else "http"
    return listening, f"{host}:{port}", f"{scheme}://{host}:{port}"


def _most_connections(wanted: int) -> int:
    """Return `wanted`, or fewer where there are not as many file descriptors."""
    possible = clients_within(raise_file_limit())
    if possible < wanted:
        logger.warning("the limit on open files allows %d connections, not %d", possible, wanted)
    return min(possible, wanted)


async def run(settings: GatewaySettings) -> None:
    """Serve until SIGTERM or SIGINT; a second signal does not wait for open requests.

    The gateway waits for model folders that are still being fetched.
    """
    stopping = asyncio.Event()
    _on_signals(stopping.set)
    named = (folder for one in settings.each for folder in (one.model, one.tokenizer))
    folders = [folder for folder in named if folder is not None]
    if not await until_there(folders, stopping):
        return
    server = GatewayServer(settings)
    _on_signals(server.stop)
    await server.serve()


def _on_signals(stop: Callable[[], None]) -> None:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)


async def until_there(folders: Sequence[Path], stopping: asyncio.Event) -> bool:
    """Wait for all folders; return False when stopped before they exist.

    Their download may not be finished when the gateway starts. A dangling link does not count as
    existing. The content of a folder is checked elsewhere.
    """
    polls = 0
    while missing := [folder for folder in folders if not folder.exists()]:
        if polls % _POLLS_PER_WORD == 0:
            logger.warning("waiting for %s, which is not there yet", missing[0])
        polls += 1
        try:
            async with asyncio.timeout(_POLL_S):
                await stopping.wait()
        except TimeoutError:
            continue
        return False
    if polls:
        logger.info("%s is there", folders[0])
    return True
