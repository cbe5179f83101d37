"""The launcher with real child processes that stand in for the services."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import signal
import socket
from pathlib import Path
from typing import Any

import pytest
from support.fakes.model import FakeModel
from support.fakes.scheduler import default_info
from support.fakes.scheduler import running as fake_scheduler
from support.fakes.worker import FakeSupervisor, FakeWorker
from support.processes.launcher import Bench
from surestep_common.errors import InvalidRequest, SurestepError, Unavailable
from surestep_proto import supervisor_pb2 as pb


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


async def test_whoever_starts_the_launcher_may_watch_it(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Systemd does, with Type=notify and WatchdogSec."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    listener.bind(str(bench.folder / "notify"))
    listener.settimeout(20)
    monkeypatch.setenv("NOTIFY_SOCKET", str(bench.folder / "notify"))
    async with asyncio.TaskGroup() as tasks:
        run = tasks.create_task(bench.launcher(bench.services()).run())
        told = [await asyncio.to_thread(listener.recv, 100) for _ in range(3)]
        os.kill(os.getpid(), signal.SIGINT)
    with listener:
        while (last := listener.recv(100)) == b"WATCHDOG=1":
            pass
    assert told == [b"READY=1", b"WATCHDOG=1", b"WATCHDOG=1"]
    assert last == b"STOPPING=1"
    assert run.result() == 0


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
    (engine,) = services.engines
    scheduler = engine.scheduler._replace(child=bench.child("talker", "fail"))
    services = services._replace(engines=(engine._replace(scheduler=scheduler),))
    with pytest.raises(Unavailable, match="talker ended: exit status 1\n  bad settings\nFull log"):
        await bench.launcher(services).run()
    assert bench.lines().count("start talker") == 1


async def test_a_service_that_dies_is_started_again(bench: Bench) -> None:
    services = bench.services()
    async with asyncio.TaskGroup() as tasks:
        run = tasks.create_task(bench.launcher(services).run())
        await bench.up(services)
        for child in (services.schedulers[0].child, services.workers[1].child):
            assert child.pid is not None
            os.kill(child.pid, signal.SIGKILL)
        await bench.until(lambda: bench.lines().count("start scheduler") == 2)
        await bench.until(lambda: bench.lines().count("start worker1") == 2)
        os.kill(os.getpid(), signal.SIGINT)
    assert run.result() == 0
    assert bench.lines().count("start gateway") == 1


@pytest.mark.parametrize(
    ("headless", "modules", "path"),
    [
        (False, False, "/v1/chat/completions"),
        (True, False, "/v1/embeddings"),
        (False, True, "/v1/embeddings"),
    ],
)
@pytest.mark.rotates(1)
async def test_what_to_try_suits_the_model(
    bench: Bench,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    headless: bool,
    modules: bool,
    path: str,
) -> None:
    if modules:
        (tmp_path / "modules.json").write_text("[]")
    info = default_info(headless=headless, model_path=str(tmp_path))
    services = bench.services()
    async with fake_scheduler(info=info) as fake, asyncio.TaskGroup() as tasks:
        launcher = bench.launcher(services, scheduler=f"127.0.0.1:{fake.port}")
        run = tasks.create_task(launcher.run())
        await bench.up(services)
        os.kill(os.getpid(), signal.SIGINT)
    assert run.result() == 0
    said = capfd.readouterr().out.splitlines()
    assert [line for line in said if line.startswith("Look:") and line.endswith("/ui")]
    (line,) = [line for line in said if line.startswith("Try:")]
    assert f"{path} " in line
    body = json.loads(shlex.split(line)[-1])
    assert body["model"] == "tiny"
    assert ("input" in body) == (path == "/v1/embeddings")


async def test_a_model_that_only_makes_embeddings_is_not_taken_for_another(bench: Bench) -> None:
    async with fake_scheduler(info=default_info(headless=True)) as fake:
        launcher = bench.launcher(
            bench.services(), scheduler=f"127.0.0.1:{fake.port}", must_write=True
        )
        with pytest.raises(InvalidRequest, match="--runner generate: tiny writes no text"):
            await launcher.run()


class Broken(FakeSupervisor):
    """Supervisor of a rank that cannot start."""

    def __init__(self, **says: Any) -> None:
        super().__init__(lambda: FakeWorker(FakeModel()))
        self._says = says

    async def Status(
        self, request: pb.SupervisorStatusRequest, context: Any
    ) -> pb.SupervisorStatus:
        return pb.SupervisorStatus(rank=1, rank_state=pb.STARTING, **self._says)


@pytest.mark.parametrize(
    ("says", "error"),
    [
        ({"failure": "no such tensor", "failure_is_permanent": True}, InvalidRequest),
        ({"failure": "no such tensor", "restarts": 2}, Unavailable),
    ],
)
async def test_a_rank_that_cannot_start_ends_the_start(
    bench: Bench, says: dict[str, Any], error: type[SurestepError]
) -> None:
    async with Broken(restarts=1) as first, Broken(**says) as second:
        services = bench.services(gateway="run", supervisors=[first, second])
        with pytest.raises(error, match=r"^rank 1 cannot start: no such tensor\nFull log: "):
            await bench.launcher(services).run()


async def test_what_is_not_ready_in_time_shows_the_ends_of_the_logs(bench: Bench) -> None:
    services = bench.services(gateway="run")
    with pytest.raises(Unavailable) as raised:
        await bench.launcher(services, startup_timeout_s=1).run()
    lines = str(raised.value).splitlines()
    assert lines[0] == "not ready after 1 s: no answer yet"
    assert [line for line in lines if line.endswith(":")] == [
        *("gateway:", "scheduler:", "worker0:", "worker1:")
    ]


async def test_a_signal_during_the_start_stops_it(bench: Bench) -> None:
    async with asyncio.TaskGroup() as tasks:
        run = tasks.create_task(bench.launcher(bench.services(gateway="run")).run())
        await bench.until(lambda: len(bench.lines()) == 4)
        os.kill(os.getpid(), signal.SIGINT)
    assert run.result() == 0
