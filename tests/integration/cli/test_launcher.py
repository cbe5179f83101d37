"""The launcher with real child processes that stand in for the services."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import stand_in_service
from rich.console import Console
from surestep_cli.child import Child, Command
from surestep_cli.launcher import Launcher, Services
from surestep_cli.ports import free_addresses
from surestep_cli.startup import Startup
from surestep_common.errors import Unavailable

SCRIPT = stand_in_service.__file__
QUIET = Console(quiet=True)


class Bench:
    """Builds stand-ins that write one journal."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.journal = folder / "journal"
        self.port = free_addresses({"gateway": 1})["gateway"].rpartition(":")[2]

    def child(self, name: str, behaviour: str) -> Child:
        argv = (sys.executable, SCRIPT, behaviour, name, str(self.journal), self.port)
        return Child(
            Command(name=name, argv=argv, environ={}, log_path=self.folder / f"{name}.log")
        )

    def services(self, gateway: str = "serve", scheduler: str = "run") -> Services:
        workers = tuple(self.child(f"worker{rank}", "run") for rank in range(2))
        return Services(self.child("gateway", gateway), self.child("scheduler", scheduler), workers)

    def launcher(self, services: Services, drain_s: float = 5.0) -> Launcher:
        url = f"http://127.0.0.1:{self.port}"
        logs = [worker.command.log_path for worker in services.workers]
        startup = Startup(url, "tiny", logs, QUIET)
        return Launcher(services, startup, needs_key=False, startup_timeout_s=20, drain_s=drain_s)

    def lines(self) -> list[str]:
        return self.journal.read_text().splitlines() if self.journal.exists() else []

    async def up(self, services: Services) -> None:
        """Every service runs and the launcher has said so."""
        await self.until(lambda: all(child.proven for child in services.all))
        await self.until(lambda: len(self.lines()) == len(services.all))

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(20):
            while not condition():  # other processes make it true
                await asyncio.sleep(0.02)


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    yield Bench(tmp_path)
    assert [p for p in psutil.Process().children(recursive=True) if SCRIPT in _cmdline(p)] == []


def _cmdline(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.NoSuchProcess:
        return []


async def test_services_end_in_the_order_of_dependence(bench: Bench) -> None:
    services = bench.services()
    async with asyncio.TaskGroup() as tasks:
        run = tasks.create_task(bench.launcher(services).run())
        await bench.up(services)
        os.kill(os.getpid(), signal.SIGINT)
    assert run.result() == 0
    stops = [line for line in bench.lines() if line.startswith("stop")]
    assert stops[:2] == ["stop gateway", "stop scheduler"]
    assert sorted(stops[2:]) == ["stop worker0", "stop worker1"]


async def test_a_second_signal_kills(bench: Bench) -> None:
    services = bench.services(scheduler="deaf")
    async with asyncio.TaskGroup() as tasks:
        run = tasks.create_task(bench.launcher(services).run())
        await bench.up(services)
        os.kill(os.getpid(), signal.SIGINT)
        await bench.until(lambda: "stop gateway" in bench.lines())
        os.kill(os.getpid(), signal.SIGTERM)
    assert run.result() == 130
    assert "stop worker0" not in bench.lines()


async def test_a_service_that_cannot_start_ends_everything(bench: Bench) -> None:
    services = bench.services(gateway="run", scheduler="run")
    services = services._replace(scheduler=bench.child("talker", "fail"))
    with pytest.raises(Unavailable, match="talker ended: exit status 1\n  bad settings\nFull log"):
        await bench.launcher(services).run()
    assert bench.lines().count("start talker") == 1


async def test_a_service_that_dies_is_started_again(bench: Bench) -> None:
    services = bench.services()
    async with asyncio.TaskGroup() as tasks:
        run = tasks.create_task(bench.launcher(services).run())
        await bench.up(services)
        for child in (services.scheduler, services.workers[1]):
            assert child.pid is not None
            os.kill(child.pid, signal.SIGKILL)
        await bench.until(lambda: bench.lines().count("start scheduler") == 2)
        await bench.until(lambda: bench.lines().count("start worker1") == 2)
        os.kill(os.getpid(), signal.SIGINT)
    assert run.result() == 0
    assert bench.lines().count("start gateway") == 1


async def test_a_service_that_keeps_dying_ends_everything(bench: Bench) -> None:
    child = bench.child("scheduler", "fail")
    child.proven = True
    with pytest.raises(Exception, match="scheduler ended: exit status 3"):
        await child.keep()
    assert bench.lines().count("start scheduler") == 6


async def test_a_rank_that_keeps_dying_before_the_start_ends_everything(bench: Bench) -> None:
    services = bench.services(gateway="run")
    log = services.workers[0].command.log_path
    log.write_text("rank 0 ended: an earlier run\nrank 0 ended: an earlier run\n")

    async def die_twice() -> None:
        await bench.until(lambda: len(bench.lines()) == 4)
        with log.open("a") as file:
            file.write("rank 0 ended: no\nrank 0 ended: no such tensor\n")

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(die_twice())
        with pytest.raises(Unavailable, match="the worker cannot start: no such tensor"):
            await bench.launcher(services).run()


async def test_a_signal_during_the_start_stops_it(bench: Bench) -> None:
    async with asyncio.TaskGroup() as tasks:
        run = tasks.create_task(bench.launcher(bench.services(gateway="run")).run())
        await bench.until(lambda: len(bench.lines()) == 4)
        os.kill(os.getpid(), signal.SIGINT)
    assert run.result() == 0


async def test_a_deaf_service_is_killed_after_its_grace(bench: Bench) -> None:
    child = bench.child("gateway", "deaf")
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(child.keep())
        await bench.until(lambda: bench.lines() == ["start gateway"])
        began = time.monotonic()
        await child.stop(0.3)
    assert 0.3 <= time.monotonic() - began < 5


def test_no_orphan_outlives_a_killed_launcher(bench: Bench) -> None:
    code = (
        "import asyncio, sys; from pathlib import Path; sys.path[:0] = {path!r};"
        "from surestep_cli.child import Child, Command;"
        "asyncio.run(Child(Command(name='x', argv={argv!r}, environ={{}},"
        " log_path=Path({log!r}))).keep())"
    )
    argv = (sys.executable, SCRIPT, "deaf", "x", str(bench.journal))
    log = str(bench.folder / "x.log")
    parent = subprocess.Popen(
        [sys.executable, "-c", code.format(path=sys.path, argv=argv, log=log)]
    )
    try:
        deadline = time.monotonic() + 20
        while bench.lines() != ["start x"]:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        (child,) = psutil.Process(parent.pid).children()
    finally:
        parent.kill()
        parent.wait()
    psutil.wait_procs([child], timeout=10)
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE
