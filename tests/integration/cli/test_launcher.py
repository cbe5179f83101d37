"""The launcher with real child processes that stand in for the services."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import stand_in_service
from fake_model import FakeModel
from fake_worker import FakeSupervisor, FakeWorker
from ports import free_address
from rich.console import Console
from surestep_cli.child import BackOff, Child, Command
from surestep_cli.launcher import Launcher, Service, Services
from surestep_cli.ports import free_addresses
from surestep_cli.startup import Startup, Worker
from surestep_common.errors import Unavailable
from surestep_proto import engine_pb2 as pb

SCRIPT = stand_in_service.__file__
QUIET = Console(quiet=True)
ENVIRON = {"PYTHONPATH": os.pathsep.join(sys.path)}


class Bench:
    """Builds stand-ins that write one journal."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.journal = folder / "journal"
        self.port = free_addresses({"gateway": 1})["gateway"].rpartition(":")[2]
        self.supervisors: Sequence[str] = ()

    def child(self, name: str, behaviour: str) -> Child:
        """A stand-in; "talker" is the name of one that says why it fails."""
        argv = (sys.executable, SCRIPT, behaviour, name, str(self.journal), self.port)
        return Child(
            Command(name=name, argv=argv, environ=ENVIRON, log_path=self.folder / f"{name}.log")
        )

    def services(
        self, gateway: str = "serve", scheduler: str = "run", supervisors: Sequence[str] = ()
    ) -> Services:
        """Supervisors are those that the launcher asks; nobody listens at the default ones."""
        self.supervisors = supervisors or [free_address(), free_address()]
        names = {"gateway": gateway, "scheduler": scheduler, "worker0": "run", "worker1": "run"}
        one, two, *workers = (Service(self.child(*name), ()) for name in names.items())
        return Services(one, two, tuple(workers))

    def launcher(self, services: Services, startup_timeout_s: float = 20) -> Launcher:
        url = f"http://127.0.0.1:{self.port}"
        logs = [worker.child.command.log_path for worker in services.workers]
        startup = Startup(url, "tiny", list(map(Worker, self.supervisors, logs)), QUIET)
        return Launcher(
            services, startup, api_key=None, startup_timeout_s=startup_timeout_s, drain_s=5
        )

    def lines(self) -> list[str]:
        return self.journal.read_text().splitlines() if self.journal.exists() else []

    async def up(self, services: Services) -> None:
        """Every service runs and the launcher has said so."""
        await self.until(lambda: all(child.proven for child in services.children))
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
    services = services._replace(scheduler=Service(bench.child("talker", "fail"), ()))
    with pytest.raises(Unavailable, match="talker ended: exit status 1\n  bad settings\nFull log"):
        await bench.launcher(services).run()
    assert bench.lines().count("start talker") == 1


async def test_a_service_that_dies_is_started_again(bench: Bench) -> None:
    services = bench.services()
    async with asyncio.TaskGroup() as tasks:
        run = tasks.create_task(bench.launcher(services).run())
        await bench.up(services)
        for child in (services.scheduler.child, services.workers[1].child):
            assert child.pid is not None
            os.kill(child.pid, signal.SIGKILL)
        await bench.until(lambda: bench.lines().count("start scheduler") == 2)
        await bench.until(lambda: bench.lines().count("start worker1") == 2)
        os.kill(os.getpid(), signal.SIGINT)
    assert run.result() == 0
    assert bench.lines().count("start gateway") == 1


async def test_a_service_that_keeps_dying_ends_nothing(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    child = bench.child("scheduler", "fail")
    child.proven = True
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(child.keep())
        await bench.until(lambda: bench.lines().count("start scheduler") == 6)
        await child.stop(1)
    assert [message.split(";")[0] for message in caplog.messages] == [
        "scheduler ended (exit status 3)"
    ] * len(caplog.messages)
    assert 5 <= len(caplog.messages) <= 6


def test_pauses_grow_and_are_short_again_after_good_service() -> None:
    back_off = BackOff()
    pauses = [round(back_off.pause_s(lived_s=1.0), 1) for _ in range(9)]
    assert pauses == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0, 5.0]
    assert back_off.longest
    assert back_off.pause_s(lived_s=60.0) == 0.1
    assert not back_off.longest


async def test_a_flapping_service_is_told_of_once_a_minute(
    bench: Bench, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("surestep_cli.child._LONGEST_PAUSE_S", 0.1)
    child = bench.child("talker", "fail")
    child.proven = True
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(child.keep())
        await bench.until(lambda: bench.lines().count("start talker") == 8)
        await child.stop(1)
    (message,) = caplog.messages
    assert "told once in 60 s" in message
    assert message.endswith("its last words: bad settings")


async def test_a_removed_log_folder_is_made_again(bench: Bench) -> None:
    log = bench.folder / "logs" / "talker.log"
    child = Child(replace(bench.child("talker", "fail").command, log_path=log))
    child.proven = True
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(child.keep())
        await bench.until(lambda: log.exists() and "bad settings" in log.read_text())
        shutil.rmtree(log.parent)
        await bench.until(lambda: log.exists() and "bad settings" in log.read_text())
        await child.stop(1)


async def test_where_no_log_can_be_written_it_is_told_and_nothing_ends(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    file = bench.folder / "file"
    file.touch()
    command = bench.child("talker", "fail").command
    child = Child(replace(command, log_path=file / "talker.log"))
    child.proven = True
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(child.keep())
        await bench.until(lambda: len(bench.lines()) == 3)
        await child.stop(1)
    told = [message for message in caplog.messages if "goes to stderr" in message]
    assert told == [f"the output of talker goes to stderr: [Errno 17] File exists: '{file}'"]


async def test_a_command_that_cannot_be_started_is_tried_again(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    child = bench.child("talker", "fail")
    child = Child(replace(child.command, argv=(str(bench.folder / "nothing"),)))
    child.proven = True
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(child.keep())
        await bench.until(lambda: len(caplog.messages) == 3)
        await child.stop(1)
    assert "cannot be started: [Errno 2]" in caplog.messages[0]


class Broken(FakeSupervisor):
    """Of a rank that cannot start."""

    def __init__(self, **says: Any) -> None:
        super().__init__(lambda: FakeWorker(FakeModel()))
        self._says = says

    async def Status(
        self, request: pb.SupervisorStatusRequest, context: Any
    ) -> pb.SupervisorStatus:
        return pb.SupervisorStatus(rank=1, rank_state=pb.STARTING, **self._says)


@pytest.mark.parametrize(
    "says",
    [
        {"failure": "no such tensor", "failure_is_permanent": True},
        {"failure": "no such tensor", "restarts": 2},
    ],
)
async def test_a_rank_that_cannot_start_ends_the_start(bench: Bench, says: dict[str, Any]) -> None:
    async with Broken(restarts=1) as first, Broken(**says) as second:
        services = bench.services(gateway="run", supervisors=[first, second])
        with pytest.raises(Unavailable, match=r"^rank 1 cannot start: no such tensor\nFull log: "):
            await bench.launcher(services).run()


async def test_what_is_not_ready_in_time_shows_the_ends_of_the_logs(bench: Bench) -> None:
    services = bench.services(gateway="run")
    with pytest.raises(Unavailable) as raised:
        await bench.launcher(services, startup_timeout_s=1).run()
    lines = str(raised.value).splitlines()
    assert lines[0] == "not ready after 1 s: nobody answers yet"
    assert [line for line in lines if line.endswith(":")] == [
        *("gateway:", "scheduler:", "worker0:", "worker1:")
    ]


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
        "asyncio.run(Child(Command(name='x', argv={argv!r}, environ={environ!r},"
        " log_path=Path({log!r}))).keep())"
    )
    argv = (sys.executable, SCRIPT, "deaf", "x", str(bench.journal))
    log = str(bench.folder / "x.log")
    parent = subprocess.Popen(
        [sys.executable, "-c", code.format(path=sys.path, argv=argv, environ=ENVIRON, log=log)]
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
