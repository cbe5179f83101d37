"""`surestep serve`: starts gateway, scheduler and worker supervisors, and keeps them running.

All processes start at once, because most of the start-up is imports that can happen in parallel.
Settings travel in the environment: every service gets the same variables and reads its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import re
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

from pydantic_settings import SettingsError
from rich.console import Console
from surestep_common import access, log
from surestep_common.config import ENV_PREFIX, NOTIFY_SOCKET, child_environ, state_dir
from surestep_common.errors import InvalidRequest, SurestepError, Unavailable
from surestep_common.notify import READY, STOPPING, Listener, Notifier
from surestep_common.process import python_module, raise_file_limit
from surestep_common.watchdog import STANDBY
from surestep_gateway.settings.model_list import check_apart, each_model
from surestep_worker.config import gpu_is_here, torch_has_cuda
from surestep_worker.process.child import COPYABLE, START_RANK

from surestep_cli.settings.serve_settings import ServeSettings
from surestep_cli.terminal.output import unbreakable

from .child import Child, ChildFailedError, Command
from .fetch import Fetched, fetch
from .liveness import watch, watch_logs
from .ports import check_address, check_services, check_socket
from .shares import shared, told
from .startup import Starting, Startup, Worker
from .system_limits import shortages
from .wiring import gateway_environ, public_url, socket_folder, wiring, with_secret

logger = logging.getLogger(__name__)

# Logs appear as they are written.
_PROCESS = {"PYTHONUNBUFFERED": "1"}
_STOP_GRACE_S = 10.0  # for scheduler and workers, which have nothing to do once the gateway is done
_LONGEST_SLUG = 60
_INTERRUPTED = 130  # exit status after a second Ctrl-C


def launch(settings: ServeSettings) -> int:
    """Serve until SIGINT or SIGTERM. Return the exit status. Raise SurestepError."""
    console = Console(file=unbreakable(sys.stderr), highlight=False)
    log.configure("launcher", level=settings.log_level, as_json=settings.log_json)
    settings = with_secret(settings)
    access.use(settings)
    raise_file_limit()  # of the services too
    if settings.uds is not None:
        check_socket(settings.uds)
    else:
        check_address(settings.host, settings.port)
    ranks = sum(one.tensor_parallel_size for one in each_model(settings))
    for line in (*shortages(ranks), *_remarks(settings)):
        console.print(f"Warning: {line}", markup=False, soft_wrap=True)
    models = _models(settings, console)
    log_dir = log_folder(settings.log_dir)
    if sys.version_info < (3, 12):  # later ones need no telling: a thread less for each child
        asyncio.set_child_watcher(asyncio.PidfdChildWatcher())
    with socket_folder(settings) as sockets:
        wired = [
            (one.settings, wiring(*one, _own_folder(sockets, number, len(models))))
            for number, one in enumerate(models)
        ]
        for _, environ in wired:
            listen = environ[f"{ENV_PREFIX}SCHEDULER_LISTEN"]
            check_services((listen, *_supervisors(environ)))
        return asyncio.run(_serve(settings, wired, log_dir, console))


def _models(settings: ServeSettings, console: Console) -> list[Fetched]:
    """Fetch all models and share the machine out, and say how. Raise SurestepError."""
    found = [fetch(one, console) for one in each_model(settings)]
    names = [one.settings.served_model_name or (one.model.name,) for one in found]
    try:
        check_apart("name", itertools.chain.from_iterable(names))
    except SettingsError as error:
        raise InvalidRequest(str(error), param="models") from None
    folders = [one.model.path for one in found]
    wanted = [one.settings for one in found]
    each, shares = shared(wanted, [name[0] for name in names], folders)
    for line in told(each, shares):
        console.print(line, markup=False, soft_wrap=True)
    return [one._replace(settings=own) for one, own in zip(found, each, strict=True)]


def _own_folder(sockets: Path | None, number: int, count: int) -> Path | None:
    """Return the folder for the sockets of one model of so many."""
    if sockets is None or count == 1:
        return sockets
    folder = sockets / str(number)
    folder.mkdir()
    return folder


def _supervisors(environ: Mapping[str, str]) -> list[str]:
    """Return the addresses of the supervisors, by rank."""
    listen: list[str] = json.loads(environ[f"{ENV_PREFIX}SUPERVISOR_ADDRESSES"])
    return listen


def _remarks(settings: ServeSettings) -> Iterator[str]:
    """Yield warnings about the settings: one line for all flags without effect, by reason."""
    if "device" not in settings.model_fields_set and gpu_is_here() and not torch_has_cuda():
        yield "the model runs on CPUs, although there is a GPU: the torch here knows no CUDA"
    reasons: dict[str, list[str]] = {}
    for name, why in settings.without_effect.items():
        reasons.setdefault(why, []).append(name)
    if reasons:
        told = "; ".join(f"{', '.join(names)} ({why})" for why, names in reasons.items())
        yield f"without effect here: {told}"
    if mistyped := settings.mistyped_variables():
        yield f"variables that nothing reads: {', '.join(mistyped)}"
    if "api_key" in settings.model_fields_set and not settings.api_keys():
        yield "--api-key is empty: anyone who reaches the server may use it"


Wired = Sequence[tuple[ServeSettings, Mapping[str, str]]]  # each model's settings and variables


async def _serve(settings: ServeSettings, wired: Wired, log_dir: Path, console: Console) -> int:
    services = _services(wired, log_dir)
    starting = []
    for (own, environ), engine in zip(wired, services.engines, strict=True):
        logs = [worker.child.command.log_path for worker in engine.workers]
        starting.append(
            Starting(
                _name(environ),
                list(map(Worker, _supervisors(environ), logs)),
                scheduler=environ[f"{ENV_PREFIX}SCHEDULER_URL"].split(",")[0],
                must_write=own.runner == "generate",
            )
        )
    startup = Startup(
        public_url(settings, wired[0][1][f"{ENV_PREFIX}PORT"]),
        starting,
        console,
        certificate=settings.ssl_certfile,
        has_page=settings.ui,
    )
    launcher = Launcher(
        services,
        startup,
        needs_key=bool(settings.api_keys()),
        startup_timeout_s=settings.startup_timeout_s,
        drain_s=settings.shutdown_delay_s + settings.drain_timeout_s,
    )
    return await launcher.run()


def _name(environ: Mapping[str, str]) -> str:
    """Return the first name of the model whose variables these are."""
    return environ[f"{ENV_PREFIX}SERVED_MODEL_NAME"].split(",")[0]


def log_folder(wanted: Path | None) -> Path:
    """Make and return the folder for logs: `wanted`, or a new one for this start alone.

    Raises Unavailable when `wanted` cannot be made.
    """
    if wanted is None:
        return _new_folder(state_dir() / "logs", f"{datetime.now():%Y%m%d-%H%M%S}")
    try:
        log.make_folder(wanted)
    except OSError as error:
        raise Unavailable(f"--log-dir: {error}") from error
    return wanted


def _new_folder(parent: Path, name: str) -> Path:
    """Make `name` below `parent`, with a number where another start was as quick."""
    folder = parent / name
    try:
        log.make_folder(parent)
        for number in itertools.count(2):
            with contextlib.suppress(FileExistsError):
                folder.mkdir(log.FOLDER_MODE)
                break
            folder = parent / f"{name}-{number}"
    except OSError as error:
        # A child that cannot open its log has an output nevertheless: see Child.
        logger.warning("no folder for logs: %s", error)
    return folder


class Service(NamedTuple):
    """A child and its signs of life."""

    child: Child
    signs: Listener


class EngineServices(NamedTuple):
    """The services of one model."""

    scheduler: Service
    workers: tuple[Service, ...]


class Services(NamedTuple):
    """All services."""

    gateway: Service
    engines: tuple[EngineServices, ...]

    @property
    def schedulers(self) -> tuple[Service, ...]:
        return tuple(engine.scheduler for engine in self.engines)

    @property
    def workers(self) -> tuple[Service, ...]:
        return tuple(worker for engine in self.engines for worker in engine.workers)

    @property
    def all(self) -> tuple[Service, ...]:
        """In the order in which they are stopped."""
        return (self.gateway, *self.schedulers, *self.workers)

    @property
    def children(self) -> tuple[Child, ...]:
        return tuple(service.child for service in self.all)


def _services(wired: Wired, log_dir: Path) -> Services:
    """Create the services. Needs a running event loop."""

    def service(name: str, environ: Mapping[str, str], *module: str, **extra: str) -> Service:
        signs = Listener()
        inherited = child_environ({**environ, **_PROCESS})
        own = {**inherited, **extra, NOTIFY_SOCKET: signs.address}
        path = log_dir / f"{name}.log"
        command = Command(name=name, argv=python_module(*module), environ=own, log_path=path)
        return Service(Child(command), signs)

    def engine(number: int, own: ServeSettings, environ: Mapping[str, str]) -> EngineServices:
        of = f"{_slug(_name(environ))}-{number}-" if len(wired) > 1 else ""
        address = environ[f"{ENV_PREFIX}SCHEDULER_LISTEN"]
        watched = address, "--", *python_module("surestep_scheduler")
        early = (START_RANK,) if own.device == "cpu" and not own.load_on_demand else ()
        return EngineServices(
            service(f"{of}scheduler", environ, "surestep_common.watchdog", STANDBY, *watched),
            tuple(
                service(
                    f"{of}worker{rank}",
                    environ,
                    "surestep_worker",
                    *early,
                    **{f"{ENV_PREFIX}RANK": str(rank)} | COPYABLE,
                )
                for rank in range(len(_supervisors(environ)))
            ),
        )

    gateway = service("gateway", gateway_environ(wired), "surestep_gateway")
    return Services(gateway, tuple(engine(n, *one) for n, one in enumerate(wired)))


def _slug(name: str) -> str:
    """Return a name as a part of a file's."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name)[:_LONGEST_SLUG]


class Launcher:
    """Owns the children and handles Ctrl-C."""

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
        self._notifier = Notifier()

    async def run(self) -> int:
        """Start, serve until a signal comes, drain. Return the exit status. Raise SurestepError."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal)
        try:
            async with asyncio.TaskGroup() as tasks:
                for child in reversed(self._services.children):  # workers take longest to start
                    tasks.create_task(child.keep())
                if await self._started():
                    self._startup.announce(needs_key=self._needs_key)
                    checks = [tasks.create_task(watch(*each)) for each in self._services.all]
                    logs = self._services.gateway.child.command.log_path.parent
                    checks.append(tasks.create_task(watch_logs(logs)))
                    self._notifier.tell(READY)
                    checks.append(tasks.create_task(self._notifier.beat()))
                    await self._stop.wait()
                    self._notifier.tell(STOPPING)
                    for check in checks:
                        check.cancel()
                await self._drain()
        except* ChildFailedError as group:
            raise Unavailable(str(group.exceptions[0])) from None
        except* SurestepError as group:
            raise group.exceptions[0] from None
        finally:
            for service in self._services.all:
                service.signs.close()
        return _INTERRUPTED if self._killed else 0

    async def _started(self) -> bool:
        """Wait until the model is served. Return False when a signal came first. Raise
        Unavailable.
        """
        try:
            async with asyncio.timeout(self._startup_timeout_s):
                if not await self._startup.wait(self._stop):
                    return False
        except TimeoutError:
            raise Unavailable(self._too_late()) from None
        for child in self._services.children:
            child.proven = True
        return True

    def _too_late(self) -> str:
        logs = [f"{child.command.name}:\n{child.tail()}" for child in self._services.children]
        first = f"not ready after {self._startup_timeout_s:g} s: {self._startup.missing}"
        return "\n".join([first, *logs])

    async def _drain(self) -> None:
        """Let open requests finish, then stop the services in the order of their dependencies."""
        services = self._services
        await services.gateway.child.stop(self._drain_s + _STOP_GRACE_S)
        for layer in (services.schedulers, services.workers):
            async with asyncio.TaskGroup() as tasks:
                for service in layer:
                    tasks.create_task(service.child.stop(_STOP_GRACE_S))

    def _on_signal(self) -> None:
        if self._stop.is_set():
            self._killed = True
            for child in self._services.children:
                child.kill()
        else:
            self._startup.say("Stopping when the open requests are done; Ctrl-C stops at once")
        self._stop.set()
