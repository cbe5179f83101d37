"""`surestep serve`: starts gateway, scheduler and worker supervisors, and keeps them running.

All processes start at once, because most of the start-up is imports that can happen in parallel.
Settings travel in the environment: every service gets the same variables and reads its own.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from surestep_common import log
from surestep_common.config import ENV_PREFIX, child_environ, state_dir
from surestep_common.errors import SurestepError, Unavailable
from surestep_common.process import raise_file_limit

from .child import Child, ChildFailedError, Command
from .model_source import resolve
from .ports import is_free
from .serve_settings import ServeSettings
from .startup import Startup
from .wiring import wiring

# Logs appear as they are written; gRPC need not prepare for forks, because an exec follows each.
_PROCESS = {"PYTHONUNBUFFERED": "1", "GRPC_ENABLE_FORK_SUPPORT": "0"}
_STOP_GRACE_S = 10.0  # for scheduler and workers, which have nothing to do once the gateway is done
_INTERRUPTED = 130  # exit status after a second Ctrl-C


def launch(settings: ServeSettings, console: Console) -> int:
    """Serve until SIGINT or SIGTERM. Returns the exit status. Raises SurestepError."""
    log.configure("launcher", level=settings.log_level, as_json=settings.log_json)
    raise_file_limit()  # of the services too
    if settings.port and not is_free(settings.host, settings.port):
        raise Unavailable(
            f"port {settings.port} of {settings.host} is taken; --port takes another, 0 any"
        )
    model = resolve(settings.model, console)
    log_dir = settings.log_dir or state_dir() / "logs" / f"{datetime.now():%Y%m%d-%H%M%S}"
    log_dir.mkdir(parents=True, exist_ok=True)
    environ = wiring(settings, model)
    services = _services(environ, settings.tensor_parallel_size, log_dir)
    startup = Startup(
        _url(settings, environ[f"{ENV_PREFIX}PORT"]),
        environ[f"{ENV_PREFIX}SERVED_MODEL_NAME"].split(",")[0],
        [worker.command.log_path for worker in services.workers],
        console,
        certificate=settings.ssl_certfile,
    )
    launcher = Launcher(
        services,
        startup,
        needs_key=bool(settings.api_keys()),
        startup_timeout_s=settings.startup_timeout_s,
        drain_s=settings.drain_timeout_s,
    )
    return asyncio.run(launcher.run())


class Services(NamedTuple):
    """In the order in which they are stopped."""

    gateway: Child
    scheduler: Child
    workers: tuple[Child, ...]

    @property
    def all(self) -> tuple[Child, ...]:
        """Every child, gateway first."""
        return (self.gateway, self.scheduler, *self.workers)


def _services(settings: Mapping[str, str], ranks: int, log_dir: Path) -> Services:
    environ = child_environ({**settings, **_PROCESS})

    def child(name: str, *module: str, **extra: str) -> Child:
        argv = (sys.executable, "-m", *module)
        path = log_dir / f"{name}.log"
        return Child(Command(name=name, argv=argv, environ={**environ, **extra}, log_path=path))

    # Ranks have supervisors, and a gateway that hangs has clients that notice.
    address = settings[f"{ENV_PREFIX}SCHEDULER_LISTEN"]
    watched = ("surestep_common.watchdog", address, "--", sys.executable, "-m")
    return Services(
        child("gateway", "surestep_gateway"),
        child("scheduler", *watched, "surestep_scheduler"),
        tuple(
            child(f"worker{rank}", "surestep_worker", SURESTEP_RANK=str(rank))
            for rank in range(ranks)
        ),
    )


def _url(settings: ServeSettings, port: str) -> str:
    """How clients on this machine reach the server."""
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(settings.host, settings.host)  # noqa: S104
    return f"{'https' if settings.ssl_certfile else 'http'}://{host}:{port}"


class Launcher:
    """Owns the children and the answer to Ctrl-C."""

    def __init__(
        self,
        services: Services,
        startup: Startup,
        *,
        needs_key: bool,
        startup_timeout_s: float,
        drain_s: float,
    ) -> None:
        self._services = services
        self._startup = startup
        self._needs_key = needs_key
        self._startup_timeout_s = startup_timeout_s
        self._drain_s = drain_s
        self._stop = asyncio.Event()
        self._killed = False

    async def run(self) -> int:
        """Start, serve until a signal comes, drain. Exit status. Raises SurestepError."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal)
        try:
            async with asyncio.TaskGroup() as tasks:
                for child in self._services.all:
                    tasks.create_task(child.keep())
                if await self._started():
                    self._startup.announce(needs_key=self._needs_key)
                    await self._stop.wait()
                await self._drain()
        except* ChildFailedError as group:
            raise Unavailable(str(group.exceptions[0])) from None
        except* SurestepError as group:
            raise group.exceptions[0] from None
        return _INTERRUPTED if self._killed else 0

    async def _started(self) -> bool:
        """Wait until the model answers. False when a signal came first. Raises Unavailable."""
        try:
            async with asyncio.timeout(self._startup_timeout_s):
                if not await self._startup.wait(self._stop):
                    return False
        except TimeoutError:
            raise Unavailable(f"not ready after {self._startup_timeout_s:g} s") from None
        for child in self._services.all:
            child.proven = True
        return True

    async def _drain(self) -> None:
        """Open requests finish, then the services end in the order in which they depend."""
        gateway, scheduler, workers = self._services
        await gateway.stop(self._drain_s + _STOP_GRACE_S)
        await scheduler.stop(_STOP_GRACE_S)
        async with asyncio.TaskGroup() as tasks:
            for worker in workers:
                tasks.create_task(worker.stop(_STOP_GRACE_S))

    def _on_signal(self) -> None:
        if self._stop.is_set():
            self._killed = True
            for child in self._services.all:
                child.kill()
        else:
            self._startup.say("Stopping when the open requests are done; Ctrl-C stops at once")
        self._stop.set()
