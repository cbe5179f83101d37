"""Workers that die, hang or disagree: requests go on, without a lost or repeated token."""

from __future__ import annotations

import asyncio
import os
import signal
import sys

import grpc
import pytest
from support.fakes.model import FakeModel
from support.fakes.worker import FakeSupervisor, FakeWorker, fake_worker, serving
from support.processes.scheduler_harness import (
    Client,
    Gate,
    code_of,
    expected,
    make_request,
    make_settings,
    scheduler,
    stub_of,
)
from surestep_common.errors import InvalidRequest
from surestep_common.rpc import connect
from surestep_proto import scheduler_pb2 as pb
from surestep_proto import worker_pb2

MODEL = FakeModel()
MESSAGES = [make_request(i, 1 + i, 90, stop_token_ids=[]) for i in range(24)]
EXPECTED = [expected(MODEL, message) for message in MESSAGES]
IMPATIENT = {
    "step_deadline_floor_s": 1.5,
    "step_deadline_ceiling_s": 2.0,
    "step_warmup_s": 2.0,
}


async def finish(client: Client, calls: list[asyncio.Task[list[int]]]) -> pb.SchedulerStats:
    assert await asyncio.gather(*calls) == EXPECTED
    stats = await client.idle()
    assert stats.num_blocks_used == 0
    return stats


def start_all(client: Client) -> list[asyncio.Task[list[int]]]:
    async def tokens(message: pb.GenerateRequest) -> list[int]:
        return (await client.generate(message)).tokens

    return [asyncio.ensure_future(tokens(message)) for message in MESSAGES]


@pytest.mark.parametrize("depth", [0, 1, 2])
async def test_a_killed_worker_costs_no_token(depth: int) -> None:
    gate = Gate(epoch=1, steps=12)
    first = FakeWorker(MODEL, before_step=gate)
    address = await first.start()
    async with scheduler(make_settings([address], pipeline_depth=depth)) as client:
        calls = start_all(client)
        await gate.reached.wait()
        await first.stop()
        await client.health(serving=False)
        async with serving(FakeWorker(MODEL), address):
            stats = await finish(client, calls)
    assert stats.num_epochs == 2
    assert stats.num_replayed_requests > 0


async def test_a_hung_worker_is_replaced() -> None:
    gate = Gate(epoch=1, steps=12)
    supervisor = FakeSupervisor(lambda: FakeWorker(MODEL, before_step=gate))
    address = await supervisor.start()
    try:
        # The rank's address is the supervisor's to know: it changes with every process.
        async with scheduler(
            make_settings([], supervisor_addresses=[address], **IMPATIENT)
        ) as client:
            stats = await finish(client, start_all(client))
            status = await client.stub.Status(pb.SchedulerStatusRequest())
    finally:
        gate.opened.set()
        await supervisor.stop()
    assert stats.num_step_deadlines_exceeded == 1
    assert [reason.split(" within")[0] for reason in supervisor.reasons] == ["no result"]
    assert status.supervisors[0].restarts == 1
    assert (status.epoch, status.state, len(status.ranks)) == (2, pb.SERVING, 1)


async def test_a_hung_worker_without_supervisor_is_fenced() -> None:
    async with (
        fake_worker(MODEL, before_step=Gate(epoch=1, steps=5)) as worker,
        scheduler(make_settings([worker], **IMPATIENT)) as client,
    ):
        stats = await finish(client, start_all(client))
    assert (stats.num_epochs, stats.num_step_deadlines_exceeded) == (2, 1)


async def test_ranks_that_disagree_are_fenced() -> None:
    def once(plan: worker_pb2.StepPlan) -> int:
        return int((plan.epoch, plan.step) == (1, 9))

    async with (
        fake_worker(MODEL, rank=0, world_size=2) as rank0,
        fake_worker(MODEL, rank=1, world_size=2, perturb=once) as rank1,
        scheduler(make_settings([rank0, rank1])) as client,
    ):
        stats = await finish(client, start_all(client))
    assert stats.num_epochs == 2
    assert stats.num_replayed_requests > 0


async def test_ranks_in_the_wrong_order_are_not_served() -> None:
    async with (
        fake_worker(MODEL, rank=0, world_size=2) as rank0,
        fake_worker(MODEL, rank=1, world_size=2) as rank1,
        scheduler(make_settings([rank1, rank0]), serving=False) as client,
    ):
        error = await code_of(client.generate(make_request(1)))
        assert error.code() == grpc.StatusCode.UNAVAILABLE
        error = await code_of(client.stub.Info(pb.SchedulerInfoRequest()))
        assert error.code() == grpc.StatusCode.UNAVAILABLE
        status = await client.stub.Status(pb.SchedulerStatusRequest())
        assert status.state == pb.WAITING_FOR_WORKERS


async def test_a_request_that_kills_every_worker_is_given_up() -> None:
    async def poisoned(plan: worker_pb2.StepPlan) -> None:
        if any(admission.request_id == "r7" for admission in plan.admissions):
            raise RuntimeError("illegal memory access")

    async with (
        fake_worker(MODEL, before_step=poisoned) as worker,
        scheduler(make_settings([worker])) as client,
    ):
        error = await code_of(client.generate(make_request(7)))
        assert error.code() == grpc.StatusCode.DATA_LOSS
        assert "ended the workers 4 times" in (error.details() or "")
        answer = await client.generate(make_request(1))
        assert answer.tokens == expected(MODEL, make_request(1))
        assert (await client.idle()).finished_requests["error"] == 1


async def test_settings_that_cannot_work_end_the_process() -> None:
    settings_ = {"max_num_seqs": 16, "max_num_batched_tokens": 16}
    async with fake_worker(MODEL) as worker:
        with pytest.raises(ExceptionGroup) as group:
            async with scheduler(make_settings([worker], **settings_)):
                pass
    assert group.group_contains(InvalidRequest, match="max_num_batched_tokens")


async def test_sigterm_lets_open_requests_finish() -> None:
    gate = Gate(epoch=1, steps=4)
    async with fake_worker(MODEL, before_step=gate) as worker:
        environ = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(sys.path),
            "SURESTEP_SCHEDULER_LISTEN": "127.0.0.1:0",
            "SURESTEP_WORKER_ADDRESSES": f'["{worker}"]',
        }
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "surestep_scheduler", env=environ, stderr=asyncio.subprocess.PIPE
        )
        try:
            address = await read_address(process)
            async with connect(address) as channel:
                client = Client(stub_of(channel), channel)
                await client.health()
                call = asyncio.ensure_future(client.generate(MESSAGES[0]))
                await gate.reached.wait()
                process.send_signal(signal.SIGTERM)
                await client.health(serving=False)
                gate.opened.set()
                assert (await call).tokens == EXPECTED[0]
            async with asyncio.timeout(10):
                assert await process.wait() == 0
        finally:
            if process.returncode is None:
                process.kill()
            await process.communicate()


async def read_address(process: asyncio.subprocess.Process) -> str:
    assert process.stderr is not None
    async with asyncio.timeout(20):
        while True:
            line = (await process.stderr.readline()).decode()
            assert line, "the scheduler ended"
            if "listens on" in line:
                return line.split("listens on ")[1].strip()


async def test_hundreds_of_preemptions_with_workers_that_die_change_no_token() -> None:
    small = FakeModel(num_blocks=20, num_slots=16, max_draft_tokens=3)  # 19 blocks of 4 tokens
    messages = [make_request(i, 3 + i % 7, 40, stop_token_ids=[]) for i in range(300)]
    supervisor = FakeSupervisor(lambda: FakeWorker(small))
    async with supervisor as address:
        settings = make_settings([], supervisor_addresses=[address], max_queue_len=400)
        async with scheduler(settings) as client, asyncio.TaskGroup() as tasks:
            calls = [tasks.create_task(client.generate(message)) for message in messages]
            for losses in range(1, 6):
                await client.until(lambda s, n=60 * losses: s.num_preemptions > n)  # type: ignore[misc]
                await supervisor.lose()
                await client.until(lambda s, n=losses: s.num_recoveries >= n)  # type: ignore[misc]
    stats_of = [call.result().end for call in calls]
    assert [call.result().tokens for call in calls] == [expected(small, m) for m in messages]
    assert sum(end.num_preemptions for end in stats_of) > 300
    assert sum(end.num_replays for end in stats_of) > 0
