"""What is known about a lost epoch: its cause, and how long noticing and recovering took."""

from __future__ import annotations

import asyncio
import re
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from typing import Any

import grpc
import pytest
from support.fakes.loop import perfect
from support.fakes.model import FakeModel
from support.fakes.worker import FakeSupervisor, FakeWorker, fake_worker
from support.patience import PATIENCE_S
from support.processes.scheduler_harness import (
    TIMEOUT_S,
    Client,
    Gate,
    code_of,
    expected,
    make_request,
    make_settings,
    scheduler,
)
from surestep_proto import scheduler_pb2 as pb
from surestep_proto import supervisor_pb2, worker_pb2
from surestep_scheduler.engine import engine
from surestep_scheduler.engine.steps import SHARES

MODEL = FakeModel()
MESSAGES = [make_request(i, 1 + i, 90, stop_token_ids=[]) for i in range(24)]
EXPECTED = [expected(MODEL, message) for message in MESSAGES]
FLOOR_S, WARMUP_S = 1.0, 30.0
IMPATIENT = {"step_deadline_floor_s": FLOOR_S, "step_warmup_s": WARMUP_S}


async def everything(client: Client) -> None:
    """All requests get all their tokens."""
    answers = await asyncio.gather(*map(client.generate, MESSAGES))
    assert [answer.tokens for answer in answers] == EXPECTED


async def status_of(client: Client) -> pb.SchedulerStatus:
    status: pb.SchedulerStatus = await client.stub.Status(
        pb.SchedulerStatusRequest(), timeout=TIMEOUT_S
    )
    return status


def supervised(supervisor: str, **changes: Any) -> Any:
    return scheduler(make_settings([], supervisor_addresses=[supervisor], **changes))


@pytest.mark.parametrize(
    ("exit_cause", "phase", "cause"),
    [
        (supervisor_pb2.KILLED, supervisor_pb2.FORWARD, "worker_exit"),
        (supervisor_pb2.EXITED, supervisor_pb2.IDLE, "worker_exit"),
        (supervisor_pb2.HUNG, supervisor_pb2.SAMPLING, "worker_hang"),
        (supervisor_pb2.HUNG, supervisor_pb2.DRAFTING, "drafter"),
        (supervisor_pb2.KILLED, supervisor_pb2.DRAFTING, "drafter"),
        (supervisor_pb2.OUT_OF_MEMORY, supervisor_pb2.DRAFTING, "out_of_memory"),
        (supervisor_pb2.OUT_OF_MEMORY, supervisor_pb2.IDLE, "out_of_memory"),
    ],
)
@pytest.mark.rotates(1)
async def test_the_supervisor_knows_the_cause(
    exit_cause: supervisor_pb2.ExitCause, phase: supervisor_pb2.Phase, cause: str
) -> None:
    gate = Gate(epoch=1, steps=12)
    supervisor = FakeSupervisor(lambda: FakeWorker(MODEL, before_step=gate))
    async with supervisor as address, supervised(address) as client:
        work = asyncio.ensure_future(everything(client))
        await gate.reached.wait()
        await supervisor.lose(exit_cause, phase, "signal 9")
        await work
        stats, status = await client.idle(), await status_of(client)
    (incident,) = status.incidents
    assert (incident.cause, incident.reason) == (cause, "rank 0: signal 9")
    assert +Counter(dict(stats.num_incidents)) == {cause: 1}
    assert stats.num_replayed_requests == incident.num_replayed_requests > 0
    assert stats.num_replayed_tokens == incident.num_replayed_tokens > 0
    assert stats.num_recoveries == 1
    assert 0 < incident.recover_s < 5
    assert stats.recover_s_sum == incident.recover_s
    assert stats.detect_s_sum == incident.detect_s < 5
    assert (status.num_open_requests, status.num_replaying_requests) == (0, 0)
    suspended = cause == "drafter"
    assert (stats.num_speculation_suspensions, stats.speculation_suspended) == (
        suspended,
        suspended,
    )


async def test_a_hang_right_after_a_recovery_is_found_in_time() -> None:
    """Kinds of steps that were measured in one epoch have their usual deadline in the next."""
    gates: Iterator[Gate] = iter([Gate(epoch=1, steps=20), Gate(epoch=2, steps=0)])
    supervisor = FakeSupervisor(
        lambda: FakeWorker(MODEL, before_step=next(gates, Gate(epoch=99, steps=0)))
    )
    async with supervisor as address, supervised(address, **IMPATIENT) as client:
        began = time.monotonic()
        await everything(client)
        took_s = time.monotonic() - began
        stats, status = await client.idle(), await status_of(client)
    assert [incident.cause for incident in status.incidents] == ["worker_hang"] * 2
    for incident in status.incidents:
        # The floor, or a multiple of what steps take on a machine that has other work.
        found = re.match(
            r"no result within (\d+\.\d) s; [^;]*; rank 0 was in FORWARD", incident.reason
        )
        assert found is not None, incident.reason
        deadline_s = float(found[1])
        assert FLOOR_S <= deadline_s < WARMUP_S / 2
        assert deadline_s - 0.05 <= incident.detect_s < deadline_s + FLOOR_S
    assert stats.num_step_deadlines_exceeded == 2
    assert took_s < WARMUP_S


@pytest.mark.parametrize("doing", [supervisor_pb2.AWAITING_COMPILER, supervisor_pb2.WAITING])
async def test_a_rank_that_had_no_turn_is_not_given_up_and_one_that_hangs_behind_it_is(
    doing: supervisor_pb2.Activity,
) -> None:
    """Its supervisor knows, so that it has its time again, for a core until the ceiling."""
    gate = Gate(epoch=1, steps=12)
    supervisor = FakeSupervisor(lambda: FakeWorker(MODEL, before_step=gate))
    short = IMPATIENT | {"step_warmup_s": FLOOR_S}
    async with supervisor as address, supervised(address, **short) as client:
        work = asyncio.ensure_future(everything(client))
        await gate.reached.wait()
        supervisor.activity, before = doing, supervisor.num_watched
        async with asyncio.timeout(TIMEOUT_S):  # until the deadline has passed three times
            while supervisor.num_watched < before + 3:
                await asyncio.sleep(0.05)
        stats = await client.stats()
        assert (stats.num_epochs, stats.num_step_deadlines_exceeded) == (1, 0)
        supervisor.activity = supervisor_pb2.AT_REST
        await work
        stats = await client.idle()
    assert (stats.num_epochs, stats.num_step_deadlines_exceeded) == (2, 1)
    assert dict(stats.num_incidents)["worker_hang"] == 1


@pytest.mark.parametrize("doing", [supervisor_pb2.AT_REST, supervisor_pb2.RUNNING])
@pytest.mark.rotates(1)
async def test_a_late_rank_is_given_up_the_earlier_the_less_it_does(
    doing: supervisor_pb2.Activity,
) -> None:
    gate = Gate(epoch=1, steps=12)
    supervisor = FakeSupervisor(lambda: FakeWorker(MODEL, before_step=gate))
    supervisor.activity = doing
    long = IMPATIENT | {"step_deadline_floor_s": 6.0}
    async with supervisor as address, supervised(address, **long) as client:
        await everything(client)
        stats = await client.idle()
        (incident,) = (await status_of(client)).incidents
    given_s = 6 * SHARES[doing]
    assert given_s <= incident.detect_s < given_s + FLOOR_S
    assert stats.num_step_deadlines_exceeded == 1


async def test_a_scheduler_that_was_stopped_does_not_blame_the_workers() -> None:
    gate = Gate(epoch=1, steps=12)
    async with (
        fake_worker(MODEL, before_step=gate) as worker,
        scheduler(make_settings([worker], **IMPATIENT)) as client,
    ):
        work = asyncio.ensure_future(everything(client))
        await gate.reached.wait()
        time.sleep(2 * FLOOR_S)  # noqa: ASYNC251  # the whole process stands still
        gate.opened.set()
        await work
        stats = await client.idle()
    assert (stats.num_epochs, stats.num_step_deadlines_exceeded) == (1, 0)


async def test_an_error_of_the_worker_is_told_from_a_lost_connection() -> None:
    async def raises(plan: worker_pb2.StepPlan) -> None:
        if (plan.epoch, plan.step) == (1, 9):
            raise RuntimeError("illegal memory access")

    supervisor = FakeSupervisor(lambda: FakeWorker(MODEL, before_step=raises))
    async with supervisor as address, supervised(address) as client:
        await everything(client)
        status = await status_of(client)
    assert [incident.cause for incident in status.incidents] == ["worker_error"]
    assert status.supervisors[0].exits[0].cause == supervisor_pb2.REQUESTED


async def test_a_lost_stream_alone_is_a_lost_connection() -> None:
    """The rank lives; it is replaced all the same, so that no step of the old epoch goes on."""

    class Cutting(FakeWorker):
        async def Run(self, requests: Any, context: Any) -> AsyncIterator[worker_pb2.StepResult]:
            async for result in super().Run(requests, context):
                if (result.epoch, result.step) == (1, 9):
                    return
                yield result

    supervisor = FakeSupervisor(lambda: Cutting(MODEL))
    async with supervisor as address, supervised(address) as client:
        await everything(client)
        status = await status_of(client)
    assert [incident.cause for incident in status.incidents] == ["connection"]
    assert len(supervisor.exits) == 1


async def test_ranks_that_disagree_are_told_from_a_broken_protocol() -> None:
    def once(plan: worker_pb2.StepPlan) -> int:
        return int((plan.epoch, plan.step) == (1, 9))

    async with (
        fake_worker(MODEL, rank=0, world_size=2) as rank0,
        fake_worker(MODEL, rank=1, world_size=2, perturb=once) as rank1,
        scheduler(make_settings([rank0, rank1])) as client,
    ):
        await everything(client)
        status = await status_of(client)
    assert [incident.cause for incident in status.incidents] == ["digest"]


async def test_all_ranks_are_replaced_together() -> None:
    gate = Gate(epoch=1, steps=12)
    first = FakeSupervisor(lambda: FakeWorker(MODEL, world_size=2, before_step=gate))
    second = FakeSupervisor(lambda: FakeWorker(MODEL, rank=1, world_size=2))
    async with (
        first as rank0,
        second as rank1,
        # The ranks know who they are: the order of addresses does not matter.
        scheduler(make_settings([], supervisor_addresses=[rank1, rank0])) as client,
    ):
        work = asyncio.ensure_future(everything(client))
        await gate.reached.wait()
        pid = second.worker.pid
        await first.lose()
        await work
        assert second.worker.pid != pid
        assert [exit_.cause for exit_ in second.exits] == [supervisor_pb2.REQUESTED]
        assert [exit_.cause for exit_ in first.exits] == [supervisor_pb2.KILLED]


async def test_workers_are_found_as_soon_as_they_are_ready(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They are asked after a small share of the time that they have taken already."""
    monkeypatch.setattr(engine, "_LONGEST_POLL_S", 2 * PATIENCE_S)
    gate = Gate(epoch=1, steps=12)
    supervisor = FakeSupervisor(lambda: FakeWorker(MODEL, before_step=gate))
    async with supervisor as address, supervised(address) as client:
        work = asyncio.ensure_future(everything(client))
        await gate.reached.wait()
        supervisor.may_start.clear()
        await supervisor.lose()
        await client.health(serving=False)
        while not (status := await status_of(client)).incidents:  # the supervisor is asked first
            pass
        assert status.state == pb.RECOVERING
        assert status.num_replaying_requests == status.incidents[0].num_replayed_requests > 0
        assert status.incidents[0].recover_s == 0
        supervisor.may_start.set()
        async with asyncio.timeout(PATIENCE_S):
            await client.health()
        await work


async def test_an_operator_replaces_workers_under_load() -> None:
    gate = Gate(epoch=1, steps=12)
    supervisor = FakeSupervisor(lambda: FakeWorker(MODEL, before_step=gate))
    async with supervisor as address, supervised(address) as client:
        work = asyncio.ensure_future(everything(client))
        await gate.reached.wait()
        request = pb.RestartWorkersRequest(reason="new kernel")
        answer = await client.stub.RestartWorkers(request, timeout=10)
        assert (answer.epoch, answer.num_ranks) == (1, 1)
        await work
        status, stats = await status_of(client), await client.idle()
    assert [(i.cause, i.reason) for i in status.incidents] == [("operator", "new kernel")]
    assert stats.num_poisoned_requests == 0
    assert supervisor.reasons == ["new kernel"]


async def test_nobody_restarts_workers_without_supervisors() -> None:
    async with fake_worker(MODEL) as worker, scheduler(make_settings([worker])) as client:
        call = client.stub.RestartWorkers(pb.RestartWorkersRequest(), timeout=5)
        assert (await code_of(call)).code() == grpc.StatusCode.UNAVAILABLE


async def test_results_of_a_lost_epoch_are_dropped_and_counted() -> None:
    """Rank 0 answers, rank 1 does not: what rank 0 said counts for nothing."""
    gate = Gate(epoch=1, steps=12)
    async with (
        fake_worker(MODEL, rank=0, world_size=2, drafter=perfect) as rank0,
        fake_worker(MODEL, rank=1, world_size=2, drafter=perfect, before_step=gate) as rank1,
        scheduler(make_settings([rank0, rank1], **IMPATIENT)) as client,
    ):
        await everything(client)
        stats = await client.idle()
    assert stats.num_fenced_messages == 2  # as many as plans are in flight


async def test_an_idle_worker_that_hangs_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("surestep_scheduler.engine.epoch.CANARY_INTERVAL_S", 0.2)
    gate = Gate(epoch=1, steps=1)
    supervisor = FakeSupervisor(lambda: FakeWorker(MODEL, before_step=gate))
    async with supervisor as address, supervised(address, **IMPATIENT) as client:
        held = await client.until(lambda stats: stats.num_slots_used == 1)  # by the canary
        assert (held.num_running, held.num_waiting, held.num_tenants) == (0, 0, 0)
        assert (await status_of(client)).num_open_requests == 0
        stats = await client.until(lambda stats: stats.num_recoveries == 1)
        status = await status_of(client)
    assert [incident.cause for incident in status.incidents] == ["worker_hang"]
    assert stats.num_canaries >= 2  # one before, and one at once when the workers were back
    assert 0 < stats.last_token_age_s < 1
    assert status.last_token_age_s > 0
    assert (stats.prompt_tokens, stats.generation_tokens) == (0, 0)
    assert not stats.finished_requests


async def test_no_canary_while_tokens_flow() -> None:
    async with (
        fake_worker(MODEL) as worker,
        scheduler(make_settings([worker])) as client,
    ):
        await everything(client)
        assert (await client.idle()).num_canaries == 0
        error = await code_of(client.generate(pb.GenerateRequest(request_id="canary")))
        assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
