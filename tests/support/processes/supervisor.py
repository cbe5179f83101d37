"""A real supervisor of stand-in ranks, and stubs of both."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from support.fakes import rank as stand_in_rank
from support.processes.commands import children
from support.processes.ports import free_address
from surestep_common import rpc
from surestep_common.tasks import end
from surestep_proto import supervisor_pb2 as pb
from surestep_proto import supervisor_pb2_grpc as pb_grpc
from surestep_proto import worker_pb2, worker_pb2_grpc
from surestep_worker.config import WorkerSettings
from surestep_worker.host.oom import OomKills
from surestep_worker.process.supervisor import Supervisor

TIMEOUT_S = 90  # a rank that fails to start takes 9 s beside others
STAND_IN = stand_in_rank.__file__
IDLE_S = 1.5  # heartbeat_timeout_s


class Supervised:
    """A supervisor, its rank, and stubs of both."""

    def __init__(
        self,
        supervisor: pb_grpc.SupervisorStub,
        rank: worker_pb2_grpc.WorkerStub,
        stop: Callable[[], Awaitable[None]],
    ) -> None:
        self._supervisor = supervisor
        self.rank = rank
        self.stop = stop
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

    async def sleep(self, level: int) -> int:
        """Put the rank to sleep; return the bytes of weights that are held for the next."""
        reply = await self._supervisor.Sleep(pb.SleepRequest(level=level), timeout=TIMEOUT_S)
        return int(reply.held_weight_bytes)

    async def wake(self) -> None:
        await self._supervisor.Wake(pb.WakeRequest(), timeout=TIMEOUT_S)

    async def info(self) -> worker_pb2.WorkerInfo:
        facts: worker_pb2.WorkerInfo = await self.rank.Info(
            worker_pb2.WorkerInfoRequest(), timeout=TIMEOUT_S, wait_for_ready=True
        )
        return facts

    async def step(self, what: int, budget_ms: int) -> None:
        """Have the rank do something; its answer is not waited for."""
        self._epoch += 1
        call = self.rank.Run(timeout=TIMEOUT_S)
        plan = worker_pb2.StepPlan(epoch=self._epoch, step=1, budget_ms=budget_ms, block_ids=[what])
        await call.write(
            plan,
        )
        self.call = call


def template_of(now: pb.SupervisorStatus) -> int:
    """The child of this process, which supervises, that is neither the rank nor its standby."""
    (found,) = {each.pid for each in children(STAND_IN)} - {now.rank_pid, now.standby_pid}
    return found


@asynccontextmanager
async def supervising(
    monkeypatch: pytest.MonkeyPatch,
    command: list[str],
    *,
    standby: bool = False,
    load_s: float = 60,
    model: Path | None = None,
    oom: OomKills | None = None,
) -> AsyncIterator[Supervised]:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path for path in sys.path if path))
    settings = WorkerSettings(
        worker_listen=free_address(),
        supervisor_listen="127.0.0.1:7",
        heartbeat_timeout_s=IDLE_S,
        load_timeout_s=load_s,
        standby=standby,
        model=model,
    )
    supervisor = Supervisor(command, settings, oom)
    server = rpc.Server([pb.DESCRIPTOR.services_by_name["Supervisor"]])
    pb_grpc.add_SupervisorServicer_to_server(supervisor, server.grpc)
    port = await server.start("127.0.0.1:0")
    async with (
        rpc.connect(f"127.0.0.1:{port}") as channel,
        rpc.connect(settings.rank_address) as rank,
        asyncio.TaskGroup() as tasks,
    ):
        running = tasks.create_task(supervisor.run())

        async def stop() -> None:
            await end(running)
            await supervisor.close()

        stubs = pb_grpc.SupervisorStub(channel), worker_pb2_grpc.WorkerStub(rank)
        try:
            yield Supervised(*stubs, stop)
        finally:
            await stop()
    await server.stop(0)
