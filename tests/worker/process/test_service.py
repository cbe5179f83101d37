"""The Worker service over real gRPC, around a runner that records what it is asked."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import AsyncIterator
from concurrent.futures import Future

import grpc
import pytest
from support.fakes.rank import Done
from surestep_common import errors, rpc
from surestep_proto import sampling_pb2
from surestep_proto import worker_pb2 as pb
from surestep_proto import worker_pb2_grpc as pb_grpc
from surestep_worker.adapters.pool import AdapterPool
from surestep_worker.process import service
from surestep_worker.process.service import StepThread, WorkerService
from surestep_worker.step.heartbeat import Heartbeat
from surestep_worker.tiers.moves import Moves

TIMEOUT_S = 10


class Recorder:
    """A runner without tensors; `gate` lets a test hold the step thread."""

    num_late_compilations = 0
    captured = 0, 0

    def __init__(self) -> None:
        self.epochs: list[int] = []
        self.threads: set[str] = set()
        self.launched: list[int] = []  # steps
        self.chores: list[str] = []  # the thread of each
        self.gate = threading.Event()
        self.gate.set()
        self.compiling = Future[None]()
        self.moves: Moves | None = None

    def open(self, epoch: int) -> None:
        self.epochs.append(epoch)

    def capture_next(self) -> None:
        self.chores.append(threading.current_thread().name)

    def compile(self, grammar: sampling_pb2.Grammar) -> Future[None]:
        """Compile for as long as somebody waits."""
        return self.compiling

    @property
    def adapters(self) -> AdapterPool:
        raise errors.InvalidRequest("there is no pool")

    def check_peers(self) -> None:
        """There is no group."""

    def launch(self, plan: pb.StepPlan) -> Done:
        assert self.gate.wait(TIMEOUT_S)
        self.threads.add(threading.current_thread().name)
        self.launched.append(plan.step)
        if plan.max_drafts:
            raise errors.InternalError("ledger")
        return Done(pb.StepResult(epoch=plan.epoch, step=plan.step))


class Rank:
    """A served rank and a stub that talks to it."""

    def __init__(self, runner: Recorder, service: WorkerService, stub: pb_grpc.WorkerStub) -> None:
        self.runner, self.service, self.stub = runner, service, stub

    def load(self) -> None:
        self.service.ready(self.runner, pb.WorkerInfo(vocab_size=7))


@pytest.fixture
async def rank() -> AsyncIterator[Rank]:
    thread, runner = StepThread(), Recorder()
    service = WorkerService(0, 1, thread, Heartbeat.local())
    server = rpc.Server([pb.DESCRIPTOR.services_by_name["Worker"]])
    pb_grpc.add_WorkerServicer_to_server(service, server.grpc)
    port = await server.start("127.0.0.1:0")
    async with rpc.connect(f"127.0.0.1:{port}") as channel:
        yield Rank(runner, service, pb_grpc.WorkerStub(channel))
    runner.gate.set()
    await server.stop(0)
    thread.close()


async def test_info_is_unavailable_until_the_model_is_loaded(rank: Rank) -> None:
    with pytest.raises(errors.Unavailable, match="loading"), rpc.translate_errors():
        await rank.stub.Info(pb.WorkerInfoRequest(), timeout=TIMEOUT_S)
    rank.load()
    info = await rank.stub.Info(pb.WorkerInfoRequest(), timeout=TIMEOUT_S)
    assert (info.vocab_size, info.world_size, info.last_epoch) == (7, 1, 0)


async def test_plans_sent_ahead_are_answered_in_order_on_one_thread(rank: Rank) -> None:
    rank.load()
    call = rank.stub.Run(timeout=TIMEOUT_S)
    for step in range(1, 6):
        await call.write(pb.StepPlan(epoch=3, step=step))
    assert [(await call.read()).step for _ in range(5)] == [1, 2, 3, 4, 5]
    await call.done_writing()
    assert await call.read() is grpc.aio.EOF  # type: ignore[attr-defined]
    assert rank.runner.epochs == [3]
    assert len(rank.runner.threads) == 1
    info = await rank.stub.Info(pb.WorkerInfoRequest(), timeout=TIMEOUT_S)
    assert (info.last_epoch, info.last_step) == (3, 5)


async def test_what_this_release_cannot_read_is_not_run_in_part(rank: Rank) -> None:
    rank.load()
    plan, grammar = (
        pb.StepPlan(epoch=3, step=1),
        pb.CompileRequest(grammar={"source": "start: /a/"}),
    )
    for message in (plan, grammar):
        message.MergeFromString(b"\xa2\x38\x03new")
    call = rank.stub.Run(timeout=TIMEOUT_S)
    await call.write(plan)
    with pytest.raises(errors.Unimplemented, match="StepPlan"), rpc.translate_errors():
        await call.read()
    with pytest.raises(errors.Unimplemented, match="CompileRequest"), rpc.translate_errors():
        await rank.stub.Compile(grammar, timeout=TIMEOUT_S)
    assert rank.runner.epochs == []


async def test_a_compilation_is_dropped_when_its_caller_has_gone(rank: Rank) -> None:
    rank.load()
    call = rank.stub.Compile(pb.CompileRequest(grammar={"source": "start: /a/"}), timeout=TIMEOUT_S)
    dropped = threading.Event()
    rank.runner.compiling.add_done_callback(lambda _: dropped.set())
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(call, 0.2)
    assert await asyncio.to_thread(dropped.wait, TIMEOUT_S)
    assert rank.runner.compiling.cancelled()


async def test_who_is_not_needed_for_long_uses_the_time(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank.load()
    rank.service.tick()
    assert rank.runner.chores == []
    monkeypatch.setattr(service, "_IDLE_NS", -1)
    rank.service.tick()
    assert len(rank.runner.chores) == 1
    call = rank.stub.Run(timeout=TIMEOUT_S)
    await call.write(pb.StepPlan(epoch=1, step=1))
    await call.read()
    rank.service.step_began(pb.StepPlan(epoch=1, step=2))
    rank.service.tick()
    assert len(rank.runner.chores) == 1  # a step is under way


async def test_an_epoch_is_never_opened_twice(rank: Rank) -> None:
    rank.load()
    first = rank.stub.Run(timeout=TIMEOUT_S)
    await first.write(pb.StepPlan(epoch=4, step=1))
    await first.read()
    second = rank.stub.Run(timeout=TIMEOUT_S)
    await second.write(pb.StepPlan(epoch=4, step=1))
    with pytest.raises(errors.InvalidRequest, match="not newer"), rpc.translate_errors():
        await second.read()


async def test_a_newer_stream_fences_the_older_one(rank: Rank) -> None:
    rank.load()
    old = rank.stub.Run(timeout=TIMEOUT_S)
    await old.write(pb.StepPlan(epoch=1, step=1))
    assert (await old.read()).step == 1
    new = rank.stub.Run(timeout=TIMEOUT_S)
    await new.write(pb.StepPlan(epoch=2, step=1))
    assert (await new.read()).epoch == 2
    await old.write(pb.StepPlan(epoch=1, step=2))
    with pytest.raises(errors.Unavailable, match="fenced"), rpc.translate_errors():
        await old.read()


async def test_what_a_gone_stream_left_ends_unheard(
    rank: Rank, caplog: pytest.LogCaptureFixture
) -> None:
    """Its steps behind the one that runs are fenced; nobody waits for them any more."""
    rank.load()
    rank.runner.gate.clear()
    old = rank.stub.Run(timeout=TIMEOUT_S)
    for step in (1, 2, 3):
        await old.write(pb.StepPlan(epoch=1, step=step))
    async with asyncio.timeout(TIMEOUT_S):
        while rank.service._thread._pool._work_queue.qsize() < 2:  # behind the one that runs
            await asyncio.sleep(0.01)
    new = rank.stub.Run(timeout=TIMEOUT_S)
    await new.write(pb.StepPlan(epoch=2, step=1))
    old.cancel()
    rank.runner.gate.set()
    assert (await new.read()).epoch == 2
    gc.collect()
    assert "never retrieved" not in caplog.text


async def test_the_loop_answers_while_a_step_runs(rank: Rank) -> None:
    rank.load()
    rank.runner.gate.clear()
    call = rank.stub.Run(timeout=TIMEOUT_S)
    await call.write(pb.StepPlan(epoch=1, step=1))
    info = await rank.stub.Info(pb.WorkerInfoRequest(), timeout=TIMEOUT_S)
    assert info.last_step == 0
    rank.runner.gate.set()
    async with asyncio.timeout(TIMEOUT_S):
        assert (await call.read()).step == 1


async def test_a_failing_step_ends_the_stream_with_its_status(rank: Rank) -> None:
    rank.load()
    call = rank.stub.Run(timeout=TIMEOUT_S)
    await call.write(pb.StepPlan(epoch=1, step=1, max_drafts=[1]))
    await call.write(pb.StepPlan(epoch=1, step=2))
    with pytest.raises(errors.InternalError, match="ledger"), rpc.translate_errors():
        await call.read()


async def test_nothing_runs_behind_a_failed_step(rank: Rank) -> None:
    """Other ranks are still in it."""
    rank.load()
    rank.runner.gate.clear()
    call = rank.stub.Run(timeout=TIMEOUT_S)
    await call.write(pb.StepPlan(epoch=1, step=1, max_drafts=[1]))
    await call.write(pb.StepPlan(epoch=1, step=2))
    async with asyncio.timeout(TIMEOUT_S):
        while not rank.service._thread._pool._work_queue.qsize():
            await asyncio.sleep(0.01)
    rank.runner.gate.set()
    with pytest.raises(errors.InternalError, match="ledger"), rpc.translate_errors():
        await call.read()
    again = rank.stub.Run(timeout=TIMEOUT_S)
    await again.write(pb.StepPlan(epoch=2, step=1))
    assert (await again.read()).epoch == 2
    assert rank.runner.launched == [1, 1]
