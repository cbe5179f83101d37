"""What a step stream says when it is lost, and a supervisor whose rank is not ready."""

from __future__ import annotations

import asyncio

import grpc
import pytest
from support.fakes.worker import fake_worker
from surestep_common.errors import ConnectionLost, InternalError, SurestepError, Unavailable
from surestep_proto import supervisor_pb2, worker_pb2
from surestep_scheduler.engine.supervisors import Supervisors
from surestep_scheduler.engine.workers import WorkerGroup


class Hidden:
    """The call of a client whose write has failed before the status of the stream came."""

    async def read(self) -> None:
        none = grpc.aio.Metadata()
        raise grpc.aio.AioRpcError(
            grpc.StatusCode.INTERNAL, none, none, "Internal error from Core", ""
        )

    def cancel(self) -> None:
        """Nothing to cancel."""


async def run(group: WorkerGroup, plan: bytes) -> None:
    async with asyncio.TaskGroup() as tasks:
        group.start(tasks, lambda: None, 1)
        await group.send(plan, 5)


@pytest.mark.parametrize(("epoch", "kind"), [(1, InternalError), (2, ConnectionLost)])
async def test_a_rank_says_what_ended_its_stream(epoch: int, kind: type[SurestepError]) -> None:
    async def raises(plan: worker_pb2.StepPlan) -> None:
        raise InternalError("illegal memory access")

    async with fake_worker(before_step=raises) as address:
        first, second = WorkerGroup([address]), WorkerGroup([address])
        plan = worker_pb2.StepPlan(epoch=1, step=1).SerializeToString()
        with pytest.raises(ExceptionGroup, match="TaskGroup") as lost:
            await run(first, plan)
        assert isinstance(lost.value.exceptions[0], InternalError)
        second._epoch, second._calls = epoch, [Hidden()]
        with pytest.raises(kind, match="rank 0"):
            await second._read(0, lambda: None)
        await first.close()
        await second.close()


async def test_a_state_of_another_release_is_one_in_which_a_rank_is_not_ready() -> None:
    supervisors = Supervisors(["127.0.0.1:1"])
    newer = supervisor_pb2.SupervisorStatus(rank_state=99)  # type: ignore[arg-type]  # of a later enum
    with pytest.raises(Unavailable, match="rank 0 is 99"):
        supervisors.check_ready([newer])
    await supervisors.close()
