"""The end of a scheduler, and what requests hear while nothing is up."""

from __future__ import annotations

import asyncio
import os
import sys
from collections import Counter
from typing import Any

import grpc
import pytest
from support.fakes.model import FakeModel
from support.fakes.worker import FakeSupervisor, FakeWorker, fake_worker
from support.processes.scheduler_harness import (
    Client,
    Gate,
    code_of,
    expected,
    make_request,
    make_settings,
    scheduler,
    stub_of,
    trailing,
)
from surestep_common.errors import InvalidRequest
from surestep_common.rpc import connect
from surestep_proto import worker_pb2
from surestep_scheduler.server import running

MODEL = FakeModel()


def check_handed_back(error: grpc.aio.AioRpcError) -> None:
    """The caller may submit the request again, elsewhere."""
    assert error.code() == grpc.StatusCode.UNAVAILABLE
    assert trailing(error)["surestep-error"] == "Unavailable"
    assert float(trailing(error)["retry-after"]) > 0
    assert error.details() == "the scheduler is shutting down"


async def test_what_does_not_finish_in_time_is_handed_back() -> None:
    gate = Gate(epoch=1, steps=4)
    async with fake_worker(MODEL, before_step=gate) as worker:
        settings = make_settings([worker], drain_timeout_s=0.2, max_num_seqs=2)
        async with running(settings) as address:
            channel = connect(address)
            client = Client(stub_of(channel), channel)
            await client.health()
            calls = [  # some run, some wait
                asyncio.ensure_future(code_of(client.generate(make_request(i, max_tokens=90))))
                for i in range(5)
            ]
            await gate.reached.wait()
        for error in await asyncio.gather(*calls):
            check_handed_back(error)
        await channel.close(None)
        gate.opened.set()


async def test_a_fatal_error_hands_back_at_once_and_is_raised() -> None:
    gate = Gate(epoch=1, steps=4)
    models = iter([MODEL, FakeModel(max_step_tokens=1)])
    supervisor = FakeSupervisor(lambda: FakeWorker(next(models), before_step=gate))
    async with supervisor as rank:
        settings = make_settings([], supervisor_addresses=[rank], drain_timeout_s=60)

        async def serve(calls: list[asyncio.Task[grpc.aio.AioRpcError]]) -> None:
            async with running(settings) as address:
                client = Client(stub_of(channel := connect(address)), channel)
                await client.health()
                message = make_request(1, max_tokens=90, stop_token_ids=[])
                calls.append(asyncio.ensure_future(code_of(client.generate(message))))
                await gate.reached.wait()
                await supervisor.lose()
                await asyncio.sleep(20)  # ended by the error

        calls: list[asyncio.Task[grpc.aio.AioRpcError]] = []
        with pytest.raises(ExceptionGroup) as group:
            await serve(calls)
        check_handed_back(await calls[0])
    assert group.group_contains(InvalidRequest, match="max_num_seqs")


async def test_the_process_does_not_exit_with_0_after_a_fatal_error() -> None:
    async with fake_worker(MODEL) as worker:
        environ = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(sys.path),
            "SURESTEP_SCHEDULER_LISTEN": "127.0.0.1:0",
            "SURESTEP_WORKER_ADDRESSES": f'["{worker}"]',
            "SURESTEP_MAX_NUM_SEQS": "16",
            "SURESTEP_MAX_NUM_BATCHED_TOKENS": "16",
        }
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "surestep_scheduler", env=environ, stderr=asyncio.subprocess.PIPE
        )
        async with asyncio.timeout(20):
            _, log = await process.communicate()
    assert process.returncode == 1
    assert b"max_num_batched_tokens (16) must exceed max_num_seqs (16)" in log


@pytest.mark.parametrize("where", ["in the queue", "while no worker is up"])
async def test_deadlines_hold_everywhere(where: str) -> None:
    gate = Gate(epoch=1, steps=4)
    supervisor = FakeSupervisor(lambda: FakeWorker(MODEL, before_step=gate))
    async with (
        supervisor as rank,
        scheduler(make_settings([], supervisor_addresses=[rank], max_num_seqs=1)) as client,
    ):
        first = make_request(0, max_tokens=40, stop_token_ids=[])
        running_ = asyncio.ensure_future(client.generate(first))
        await gate.reached.wait()
        if where == "while no worker is up":
            supervisor.may_start.clear()
            await supervisor.lose()
            await client.health(serving=False)
        error = await code_of(client.generate(make_request(1), timeout_s=0.3))
        assert error.code() == grpc.StatusCode.DEADLINE_EXCEEDED
        stats = await client.until(lambda stats: stats.num_aborted_requests == 1)
        assert stats.num_running + stats.num_waiting == 1
        supervisor.may_start.set()
        gate.opened.set()
        assert (await running_).tokens == expected(MODEL, first)
        assert (await client.idle()).num_queued_tokens == 0


async def test_too_many_waiting_tokens_are_refused() -> None:
    gate = Gate(epoch=1, steps=0)
    async with (
        fake_worker(MODEL, before_step=gate) as worker,
        scheduler(make_settings([worker], max_num_seqs=1, max_queue_tokens=25)) as client,
    ):
        calls = [asyncio.ensure_future(client.generate(make_request(0, length=10)))]
        await gate.reached.wait()
        for index in (1, 2):
            calls.append(asyncio.ensure_future(client.generate(make_request(index, length=10))))
        await client.until(lambda stats: stats.num_queued_tokens == 20)
        error = await code_of(client.generate(make_request(4, length=10)))
        assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert float(trailing(error)["retry-after"]) >= 1
        gate.opened.set()
        answers = await asyncio.gather(*calls)
    assert [a.tokens for a in answers] == [expected(MODEL, make_request(i)) for i in range(3)]


async def test_workers_that_compute_nonsense_are_replaced_and_nobody_fails() -> None:
    sick = False

    def status_of(request_id: str, known: int) -> worker_pb2.RowStatus:
        return worker_pb2.NON_FINITE if sick else worker_pb2.OK

    async def falls_sick(plan: worker_pb2.StepPlan) -> None:
        nonlocal sick
        sick = plan.epoch == 1 and plan.step > 5

    messages = [make_request(i, 10, 40, stop_token_ids=[]) for i in range(8)]
    supervisor = FakeSupervisor(
        lambda: FakeWorker(MODEL, status_of=status_of, before_step=falls_sick)
    )
    async with (
        supervisor as rank,
        scheduler(make_settings([], supervisor_addresses=[rank])) as client,
    ):
        answers = await asyncio.gather(*map(client.generate, messages))
        stats: Any = await client.idle()
    assert [a.tokens for a in answers] == [expected(MODEL, message) for message in messages]
    assert +Counter(dict(stats.num_incidents)) == {"non_finite": 1}
    assert stats.finished_requests == {"length": 8}
