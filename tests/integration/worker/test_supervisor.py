"""The supervisor with real child processes and real signals."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from ports import free_address
from stand_in_rank import NOTHING, SLEEP, SLEEP_IN_NATIVE_CODE
from surestep_common import rpc
from surestep_proto import engine_pb2 as pb
from surestep_proto import engine_pb2_grpc as pb_grpc
from surestep_worker.config import WorkerSettings
from surestep_worker.supervisor import Supervisor

TIMEOUT_S = 30
STAND_IN = Path(__file__).parents[2] / "stand_in_rank.py"
IDLE_S = 1.5  # heartbeat_timeout_s


class Supervised:
    """A supervisor, its rank, and stubs of both."""

    def __init__(self, supervisor: pb_grpc.SupervisorStub, rank: pb_grpc.WorkerStub) -> None:
        self._supervisor = supervisor
        self.rank = rank
        self._epoch = 0

    async def status(self) -> pb.SupervisorStatus:
        now: pb.SupervisorStatus = await self._supervisor.Status(
            pb.SupervisorStatusRequest(), timeout=TIMEOUT_S
        )
        return now

    async def until(self, wanted: Callable[[pb.SupervisorStatus], object]) -> pb.SupervisorStatus:
        """Poll the status until it is as wanted."""
        async with asyncio.timeout(TIMEOUT_S):
            while not wanted(now := await self.status()):
                await asyncio.sleep(0.02)
        return now

    async def ready(self, *, restarts: int) -> pb.SupervisorStatus:
        return await self.until(lambda now: now.rank_state == pb.READY and now.restarts == restarts)

    async def restart(self, expected_pid: int = 0) -> bool:
        request = pb.RestartRequest(reason="test", expected_pid=expected_pid)
        reply = await self._supervisor.Restart(request, timeout=TIMEOUT_S)
        return bool(reply.restarted)

    async def step(self, what: int, budget_ms: int) -> None:
        """Have the rank do something; its answer is not waited for."""
        self._epoch += 1
        call = self.rank.Run(timeout=TIMEOUT_S)
        plan = pb.StepPlan(epoch=self._epoch, step=1, budget_ms=budget_ms, block_ids=[what])
        await call.write(
            plan,
        )
        self.call = call


@pytest.fixture
def stacks(tmp_path: Path) -> Path:
    """Where the rank dumps its stacks."""
    return tmp_path / "stacks"


@pytest.fixture
def command(stacks: Path) -> list[str]:
    return [sys.executable, str(STAND_IN), str(stacks)]


@asynccontextmanager
async def supervising(
    monkeypatch: pytest.MonkeyPatch,
    command: list[str],
    *,
    standby: bool = False,
    load_s: float = 60,
) -> AsyncIterator[Supervised]:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path for path in sys.path if path))
    settings = WorkerSettings(
        worker_listen=free_address(),
        supervisor_listen="127.0.0.1:7",
        heartbeat_timeout_s=IDLE_S,
        load_timeout_s=load_s,
        standby=standby,
    )
    for name, value in settings.environ().items():
        monkeypatch.setenv(name, value)
    supervisor = Supervisor(command, settings)
    server = rpc.Server([pb.DESCRIPTOR.services_by_name["Supervisor"]])
    pb_grpc.add_SupervisorServicer_to_server(supervisor, server.grpc)
    port = await server.start("127.0.0.1:0")
    async with (
        rpc.connect(f"127.0.0.1:{port}") as channel,
        rpc.connect(settings.rank_address) as rank,
        asyncio.TaskGroup() as tasks,
    ):
        running = tasks.create_task(supervisor.run())
        yield Supervised(pb_grpc.SupervisorStub(channel), pb_grpc.WorkerStub(rank))
        running.cancel()
    await server.stop(0)


@pytest.fixture
async def lone(monkeypatch: pytest.MonkeyPatch, command: list[str]) -> AsyncIterator[Supervised]:
    """Without a standby."""
    async with supervising(monkeypatch, command) as running:
        yield running


@pytest.fixture
async def paired(monkeypatch: pytest.MonkeyPatch, command: list[str]) -> AsyncIterator[Supervised]:
    """With a standby, once it is there."""
    async with supervising(monkeypatch, command, standby=True) as running:
        yield running


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


async def test_a_killed_rank_is_replaced(lone: Supervised) -> None:
    first = await lone.ready(restarts=0)
    os.kill(first.rank_pid, signal.SIGKILL)
    second = await lone.ready(restarts=1)
    assert second.rank_pid != first.rank_pid
    assert second.address == "127.0.0.1:7"
    assert second.last_exit == f"pid {first.rank_pid}: signal SIGKILL"
    (end,) = second.exits
    assert (end.pid, end.cause, end.reason) == (first.rank_pid, pb.KILLED, "signal SIGKILL")
    assert end.last.phase == pb.IDLE
    assert 0 < end.replaced_s < TIMEOUT_S


async def test_restart_kills_a_stopped_rank_without_waiting_for_its_stacks(
    lone: Supervised,
) -> None:
    first = await lone.ready(restarts=0)
    os.kill(first.rank_pid, signal.SIGSTOP)
    began = time.monotonic()
    assert await lone.restart(first.rank_pid)
    assert time.monotonic() - began < 0.4
    second = await lone.ready(restarts=1)
    assert second.rank_pid != first.rank_pid
    assert not alive(first.rank_pid)
    assert second.exits[0].cause == pb.REQUESTED
    assert second.exits[0].reason == "restart: test"


async def test_restart_dumps_the_stacks_of_the_rank(lone: Supervised, stacks: Path) -> None:
    await lone.ready(restarts=0)
    began = time.monotonic()
    await lone.restart()
    assert time.monotonic() - began < 0.4, "the end of the dump was not noticed"
    assert "most recent call first" in stacks.read_text()


async def test_restart_of_another_process_does_nothing(lone: Supervised) -> None:
    first = await lone.ready(restarts=0)
    assert not await lone.restart(first.rank_pid + 1)
    assert (await lone.status()).rank_pid == first.rank_pid


@pytest.mark.parametrize("how", [SLEEP, SLEEP_IN_NATIVE_CODE])
async def test_a_step_that_hangs_ends_the_rank(lone: Supervised, stacks: Path, how: int) -> None:
    await lone.ready(restarts=0)
    began = time.monotonic()
    await lone.step(how, budget_ms=1000)
    after = await lone.until(lambda now: now.restarts == 1)
    assert time.monotonic() - began < 2 * 1.0 + 0.5
    (end,) = after.exits
    assert end.cause == pb.HUNG
    assert end.reason.startswith("hung: FORWARD of step 1 in epoch 1 for 1.")
    assert end.reason.endswith("(limit 1.4 s)") or end.reason.endswith("(limit 1.5 s)")
    assert (end.last.phase, end.last.epoch, end.last.step) == (pb.FORWARD, 1, 1)
    assert "in step" in stacks.read_text()
    await lone.ready(restarts=1)


async def test_a_stopped_rank_is_found_although_it_is_idle(lone: Supervised) -> None:
    first = await lone.ready(restarts=0)
    began = time.monotonic()
    os.kill(first.rank_pid, signal.SIGSTOP)
    after = await lone.until(lambda now: now.restarts == 1)
    assert IDLE_S / 2 < time.monotonic() - began < 2 * IDLE_S
    assert after.exits[0].cause == pb.HUNG
    assert after.exits[0].reason.startswith("hung: IDLE for 1.")


async def test_a_quiet_rank_is_left_alone(lone: Supervised) -> None:
    await lone.ready(restarts=0)
    began = time.monotonic()
    await lone.step(NOTHING, budget_ms=500)
    now = await lone.until(lambda now: time.monotonic() - began > 2 * IDLE_S)
    assert (now.restarts, now.heartbeat.phase, now.heartbeat.epoch) == (0, pb.IDLE, 1)
    assert now.heartbeat.age_s < IDLE_S
