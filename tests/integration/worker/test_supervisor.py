"""The supervisor with a real child process and real signals."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from ports import free_address
from surestep_common import rpc
from surestep_proto import engine_pb2 as pb
from surestep_proto import engine_pb2_grpc as pb_grpc
from surestep_worker.supervisor import Supervisor

TIMEOUT_S = 30
STAND_IN = Path(__file__).parents[2] / "stand_in_rank.py"


@pytest.fixture
def stacks(tmp_path: Path) -> Path:
    """Where the rank dumps its stacks."""
    return tmp_path / "stacks"


@pytest.fixture
async def stub(
    monkeypatch: pytest.MonkeyPatch, stacks: Path
) -> AsyncIterator[pb_grpc.SupervisorStub]:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path for path in sys.path if path))
    address = free_address()
    command = [sys.executable, str(STAND_IN), address, str(stacks)]
    supervisor = Supervisor(command, 0, address, "127.0.0.1:7")
    server = rpc.Server([pb.DESCRIPTOR.services_by_name["Supervisor"]])
    pb_grpc.add_SupervisorServicer_to_server(supervisor, server.grpc)
    port = await server.start("127.0.0.1:0")
    async with asyncio.TaskGroup() as tasks, rpc.connect(f"127.0.0.1:{port}") as channel:
        running = tasks.create_task(supervisor.run())
        yield pb_grpc.SupervisorStub(channel)
        running.cancel()
    await server.stop(0)


async def status(stub: pb_grpc.SupervisorStub) -> pb.SupervisorStatus:
    now: pb.SupervisorStatus = await stub.Status(pb.SupervisorStatusRequest(), timeout=TIMEOUT_S)
    return now


async def ready(stub: pb_grpc.SupervisorStub, *, restarts: int) -> pb.SupervisorStatus:
    """Poll until the rank is READY after that many restarts."""
    async with asyncio.timeout(TIMEOUT_S):
        while True:
            now = await status(stub)
            if now.rank_state == pb.READY and now.restarts == restarts:
                return now
            await asyncio.sleep(0.02)


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


async def test_a_killed_rank_is_replaced(stub: pb_grpc.SupervisorStub) -> None:
    first = await ready(stub, restarts=0)
    os.kill(first.rank_pid, signal.SIGKILL)
    second = await ready(stub, restarts=1)
    assert second.rank_pid != first.rank_pid
    assert second.address == "127.0.0.1:7"
    assert second.last_exit == f"pid {first.rank_pid}: signal SIGKILL"


async def test_restart_kills_a_stopped_rank(stub: pb_grpc.SupervisorStub) -> None:
    first = await ready(stub, restarts=0)
    os.kill(first.rank_pid, signal.SIGSTOP)
    reply = await stub.Restart(
        pb.RestartRequest(reason="test", expected_pid=first.rank_pid), timeout=TIMEOUT_S
    )
    assert reply.restarted
    second = await ready(stub, restarts=1)
    assert second.rank_pid != first.rank_pid
    assert not alive(first.rank_pid)


async def test_restart_dumps_the_stacks_of_the_rank(
    stub: pb_grpc.SupervisorStub, stacks: Path
) -> None:
    await ready(stub, restarts=0)
    await stub.Restart(pb.RestartRequest(reason="test"), timeout=TIMEOUT_S)
    assert "Current thread" in stacks.read_text()


async def test_restart_of_another_process_does_nothing(stub: pb_grpc.SupervisorStub) -> None:
    first = await ready(stub, restarts=0)
    reply = await stub.Restart(
        pb.RestartRequest(reason="test", expected_pid=first.rank_pid + 1), timeout=TIMEOUT_S
    )
    assert not reply.restarted
    assert (await status(stub)).rank_pid == first.rank_pid
