"""Pauses and sleep: requests that are kept go on without a lost or repeated token."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from support.fakes.model import FakeModel
from support.fakes.worker import FakeSupervisor, FakeWorker, fake_worker
from support.processes.scheduler_harness import (
    Answer,
    Client,
    Gate,
    code_of,
    expected,
    make_request,
    make_settings,
    scheduler,
)
from surestep_proto import scheduler_pb2 as pb

MODEL = FakeModel()
MESSAGES = [make_request(i, 1 + i, 90, stop_token_ids=[]) for i in range(12)]
EXPECTED = [expected(MODEL, message) for message in MESSAGES]
STATES = {0: pb.PAUSED, 1: pb.SLEEPING, 2: pb.SLEEPING}


class Busy:
    """A scheduler with open requests, at a step of the first epoch that waits."""

    def __init__(self, client: Client, supervisors: list[FakeSupervisor], gate: Gate) -> None:
        self.client, self.supervisors, self.gate = client, supervisors, gate
        self.calls = [asyncio.ensure_future(client.generate(message)) for message in MESSAGES]

    async def pause(self, level: int, mode: pb.PauseMode, tags: tuple[str, ...] = ()) -> Any:
        """Ask for it at once, and let the step go on."""
        request = pb.PauseRequest(level=level, mode=mode, tags=tags)
        asked = asyncio.ensure_future(self.client.stub.Pause(request))
        await self.client.until(lambda stats: stats.HasField("pause"))
        self.gate.opened.set()
        return await asked

    async def resume(self, *tags: str) -> Any:
        return await self.client.stub.Resume(pb.ResumeRequest(tags=tags))

    async def state(self) -> pb.EngineState:
        state: pb.EngineState = (await self.client.stub.Status(pb.SchedulerStatusRequest())).state
        return state

    async def answers(self) -> list[Answer]:
        return await asyncio.gather(*self.calls)


@asynccontextmanager
async def busy(num_ranks: int = 1, **settings: Any) -> AsyncIterator[Busy]:
    gate = Gate(epoch=1, steps=12)

    def make(rank: int) -> FakeSupervisor:
        return FakeSupervisor(
            lambda: FakeWorker(MODEL, rank=rank, world_size=num_ranks, before_step=gate)
        )

    supervisors = list(map(make, range(num_ranks)))
    addresses = [await supervisor.start() for supervisor in supervisors]
    try:
        async with scheduler(
            make_settings([], supervisor_addresses=addresses, **settings)
        ) as client:
            running = Busy(client, supervisors, gate)
            await gate.reached.wait()
            await client.until(lambda now: now.num_running + now.num_waiting == len(MESSAGES))
            yield running
    finally:
        gate.opened.set()
        for supervisor in supervisors:
            supervisor.sleep_level = 0
            await supervisor.stop()


@pytest.mark.parametrize("level", [0, 1, 2])
@pytest.mark.parametrize("num_ranks", [1, 2])
async def test_kept_requests_go_on(level: int, num_ranks: int) -> None:
    async with busy(num_ranks) as engine:
        await engine.pause(level, pb.PAUSE_KEEP)
        assert await engine.state() == STATES[level]
        steps = (await engine.client.stats()).num_steps
        late = asyncio.ensure_future(engine.client.generate(make_request(50)))
        error = await code_of(engine.client.generate(make_request(51), timeout_s=0.2))
        assert error.code() == grpc.StatusCode.DEADLINE_EXCEEDED
        assert (await engine.client.stats()).num_steps == steps
        assert not any(call.done() for call in engine.calls)
        answer = await engine.resume()
        assert answer.epoch == (1 if level == 0 else 2)
        assert [one.tokens for one in await engine.answers()] == EXPECTED
        assert (await late).tokens == expected(MODEL, make_request(50))
        stats = await engine.client.idle()
        assert not stats.HasField("pause")
        assert sum(stats.num_incidents.values()) == 0


@pytest.mark.parametrize("level", [0, 1, 2])
async def test_aborted_requests_have_the_tokens_so_far(level: int) -> None:
    async with busy() as engine:
        answer = await engine.pause(level, pb.PAUSE_ABORT)
        assert answer.num_aborted == len(MESSAGES)
        for one, whole in zip(await engine.answers(), EXPECTED, strict=True):
            assert one.chunks[-1].finish_reason == pb.ABORTED
            assert one.tokens == whole[: len(one.tokens)]
            assert len(one.tokens) < len(whole)
        error = await code_of(engine.client.generate(make_request(50)))
        assert error.code() == grpc.StatusCode.UNAVAILABLE
        assert "an operator asked for it" in (error.details() or "")
        await engine.resume()
        again = await engine.client.generate(make_request(50))
        assert again.tokens == expected(MODEL, make_request(50))


@pytest.mark.parametrize("level", [0, 1])
async def test_it_waits_for_open_requests(level: int) -> None:
    async with busy() as engine:
        assert (await engine.pause(level, pb.PAUSE_WAIT)).num_aborted == 0
        assert [one.tokens for one in await engine.answers()] == EXPECTED
        assert await engine.state() == STATES[level]
        await engine.resume()


async def test_a_pause_that_waits_is_called_off() -> None:
    async with busy() as engine:
        waiting = asyncio.ensure_future(
            engine.client.stub.Pause(pb.PauseRequest(level=1, mode=pb.PAUSE_WAIT))
        )
        await engine.client.until(lambda stats: stats.HasField("pause"))
        await engine.resume()
        engine.gate.opened.set()
        await waiting
        assert [one.tokens for one in await engine.answers()] == EXPECTED
        assert await engine.state() == pb.SERVING
        assert (await engine.client.generate(MESSAGES[0])).tokens == EXPECTED[0]


async def test_it_wakes_when_all_parts_were_woken() -> None:
    async with busy() as engine:
        await engine.pause(1, pb.PAUSE_KEEP)
        assert [*(await engine.resume("weights")).asleep] == ["kv_cache"]
        assert await engine.state() == pb.SLEEPING
        error = await code_of(engine.resume("graphs"))
        assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert not (await engine.resume("kv_cache")).asleep
        assert [one.tokens for one in await engine.answers()] == EXPECTED


async def test_a_sleep_becomes_deeper() -> None:
    async with busy() as engine:
        assert (await engine.pause(1, pb.PAUSE_KEEP)).held_weight_bytes == 100
        assert (await engine.pause(2, pb.PAUSE_KEEP)).held_weight_bytes == 0
        assert engine.supervisors[0].sleep_level == 2
        await engine.resume()
        assert [one.tokens for one in await engine.answers()] == EXPECTED


@pytest.mark.parametrize("when", ["before", "while"])
async def test_a_rank_is_lost_when_it_shall_sleep(when: str) -> None:
    async with busy() as engine:
        (supervisor,) = engine.supervisors
        if when == "before":
            engine.gate.opened.set()
            await supervisor.lose()
            await engine.pause(1, pb.PAUSE_KEEP)
        else:
            await asyncio.gather(supervisor.lose(), engine.pause(1, pb.PAUSE_KEEP))
        assert await engine.state() == pb.SLEEPING
        assert supervisor.sleep_level == 1
        await engine.resume()
        assert [one.tokens for one in await engine.answers()] == EXPECTED


async def test_a_rank_that_a_new_supervisor_starts_is_put_to_sleep() -> None:
    async with busy() as engine:
        await engine.pause(1, pb.PAUSE_KEEP)
        (supervisor,) = engine.supervisors
        supervisor.sleep_level = 0  # it knows nothing of a sleep
        async with asyncio.timeout(20):
            while supervisor.sleep_level != 1:
                await asyncio.sleep(0.01)
        await engine.resume()
        assert [one.tokens for one in await engine.answers()] == EXPECTED


async def test_the_next_scheduler_lets_them_sleep() -> None:
    supervisor = FakeSupervisor(lambda: FakeWorker(MODEL))
    settings = make_settings([], supervisor_addresses=[await supervisor.start()])
    try:
        async with scheduler(settings) as first:
            await first.stub.Pause(pb.PauseRequest(level=2, mode=pb.PAUSE_KEEP))
        async with scheduler(settings, serving=False) as second:
            stats = await second.until(lambda stats: stats.HasField("pause"))
            assert stats.pause.level == 2
            assert supervisor.sleep_level == 2
            await second.stub.Resume(pb.ResumeRequest())
            assert (await second.generate(MESSAGES[0])).tokens == EXPECTED[0]
    finally:
        await supervisor.stop()


async def test_who_does_not_wait_for_a_pause_gets_none() -> None:
    async with busy() as engine:
        request = pb.PauseRequest(level=1, mode=pb.PAUSE_WAIT)
        error = await code_of(engine.client.stub.Pause(request, timeout=0.2))
        assert error.code() == grpc.StatusCode.DEADLINE_EXCEEDED
        await engine.client.until(lambda stats: not stats.HasField("pause"))
        engine.gate.opened.set()
        assert [one.tokens for one in await engine.answers()] == EXPECTED
        assert await engine.state() == pb.SERVING


async def test_open_requests_are_aborted_by_name() -> None:
    async with busy() as engine:
        request = pb.AbortRequest(request_ids=["r3", "r", "nobody"])
        assert (await engine.client.stub.Abort(request)).num_aborted == 1
        engine.gate.opened.set()
        finished = [one.chunks[-1].finish_reason for one in await engine.answers()]
        assert [i for i, reason in enumerate(finished) if reason == pb.ABORTED] == [3]


async def test_nobody_sleeps_whom_nobody_could_wake() -> None:
    async with fake_worker(MODEL) as worker, scheduler(make_settings([worker])) as client:
        error = await code_of(client.stub.Pause(pb.PauseRequest(level=1)))
        assert error.code() == grpc.StatusCode.UNAVAILABLE
        await client.stub.Pause(pb.PauseRequest(level=0))
        await client.stub.Resume(pb.ResumeRequest())
        assert (await client.generate(MESSAGES[0])).tokens == EXPECTED[0]


async def test_updates_exclude_each_other_from_their_pause_on() -> None:
    async with busy() as engine:
        stub = engine.client.stub
        first = asyncio.ensure_future(
            stub.UpdateWeights(pb.UpdateWeightsRequest(version="first", mode=pb.PAUSE_WAIT))
        )
        await engine.client.until(lambda stats: stats.HasField("pause"))
        error = await code_of(stub.UpdateWeights(pb.UpdateWeightsRequest(version="second")))
        assert error.code() == grpc.StatusCode.UNAVAILABLE
        assert error.details() == "other weights are on their way"
        error = await code_of(stub.StageWeights(iter(())))
        assert error.details() == "other weights are on their way"
        assert not first.done()
        engine.gate.opened.set()
        assert (await code_of(first)).details() != "other weights are on their way"
        assert [one.tokens for one in await engine.answers()] == EXPECTED


@pytest.mark.parametrize("clears", [False, True])
async def test_a_pause_may_clear_the_prefix_cache(clears: bool) -> None:
    async with busy() as engine:
        engine.gate.opened.set()
        await engine.answers()
        stub = engine.client.stub
        await stub.Pause(pb.PauseRequest(mode=pb.PAUSE_WAIT, clear_cache=clears))
        await engine.resume()
        before = (await engine.client.stats()).prefix_cache_hits
        again = await engine.client.generate(MESSAGES[11])
        assert again.tokens == EXPECTED[11]
        assert ((await engine.client.stats()).prefix_cache_hits == before) == clears
