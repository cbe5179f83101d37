"""Requests that end the workers are found and given up; nobody else is."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import NamedTuple

import grpc
import pytest
from support.fakes.model import FakeModel
from support.fakes.worker import FakeSupervisor, FakeWorker, fake_worker
from support.processes.scheduler_harness import (
    Answer,
    code_of,
    expected,
    make_request,
    make_settings,
    scheduler,
)
from surestep_common.rpc import num_delivered
from surestep_proto import scheduler_pb2 as pb
from surestep_proto import supervisor_pb2, worker_pb2

MODEL = FakeModel()
NUM = 16
MESSAGES = [make_request(i, 1 + 2 * i, 40, stop_token_ids=[]) for i in range(NUM)]


class Death(NamedTuple):
    """How a rank ends, as its supervisor tells of it."""

    cause: supervisor_pb2.ExitCause
    phase: supervisor_pb2.Phase = supervisor_pb2.FORWARD
    outside: bool = False


class Poisoned(FakeWorker):
    """Ends when a row of one of these requests may come to a fatal length."""

    def __init__(self, fatal: dict[str, int]) -> None:
        super().__init__(MODEL, before_step=self.look)
        self._fatal = fatal

    async def look(self, plan: worker_pb2.StepPlan) -> None:
        names = {slot: s.admission.request_id for slot, s in self.engine.slots.items()}
        names |= {admission.slot: admission.request_id for admission in plan.admissions}
        rows = zip(
            plan.slot, plan.len_lo, plan.len_hi, plan.num_tokens, plan.max_drafts, strict=True
        )
        for slot, low, high, num_tokens, max_drafts in rows:
            fatal = self._fatal.get(names[slot], 0)
            if low <= fatal <= high + max(num_tokens, max_drafts + 1) and fatal:
                raise RuntimeError("illegal memory access")


async def serve(
    fatal: dict[str, int], messages: Iterable[pb.GenerateRequest] = MESSAGES
) -> tuple[list[Answer | BaseException], pb.SchedulerStats]:
    supervisor = FakeSupervisor(lambda: Poisoned(fatal))
    settings = {"max_num_batched_tokens": 256}
    async with (
        supervisor as address,
        scheduler(make_settings([], supervisor_addresses=[address], **settings)) as client,
    ):
        calls = [client.generate(message) for message in messages]
        answers = await asyncio.gather(*calls, return_exceptions=True)
        return answers, await client.idle()


def check(answers: list[Answer | BaseException], fatal: dict[str, int]) -> None:
    for message, answer in zip(MESSAGES, answers, strict=True):
        if message.request_id in fatal:
            assert isinstance(answer, grpc.aio.AioRpcError)
            assert answer.code() == grpc.StatusCode.DATA_LOSS
            assert "this request ended the workers" in (answer.details() or "")
        else:
            assert isinstance(answer, Answer), answer
            assert answer.tokens == expected(MODEL, message)


async def test_one_among_many() -> None:
    fatal = {"r11": 30}  # it decodes by then
    answers, stats = await serve(fatal)
    check(answers, fatal)
    assert stats.num_poisoned_requests == 1
    assert stats.num_epochs <= 1 + 8  # log2(16) + 4 losses at most
    assert stats.finished_requests == {"length": NUM - 1, "error": 1}
    assert stats.num_blocks_used == 0


async def test_two_at_once() -> None:
    fatal = {"r3": 5, "r12": 40}
    answers, stats = await serve(fatal)
    check(answers, fatal)
    assert stats.num_poisoned_requests == 2
    assert stats.num_epochs <= 1 + 2 * 10  # they get in each other's way


async def test_the_end_of_a_call_says_how_many_of_its_chunks_went_to_the_stream() -> None:
    """The reader gets the two in any order."""
    supervisor = FakeSupervisor(lambda: Poisoned({"r5": 20}))
    message = pb.GenerateRequest.FromString(MESSAGES[5].SerializeToString())
    message.delivery.CopyFrom(pb.Delivery(stream_id="a stream", call=1))
    async with (
        supervisor as address,
        scheduler(make_settings([], supervisor_addresses=[address])) as client,
    ):
        stream = client.stub.Deliver(pb.DeliverRequest(stream_id="a stream"))
        assert not (await stream.read()).calls
        error = await code_of(client.generate(message))
        chunks = [await stream.read() for _ in range(num_delivered(error))]
        assert stream.cancel()
    ids = [id_ for batch in chunks for chunk in batch.chunks for id_ in chunk.token_ids]
    assert ids
    assert ids == expected(MODEL, message)[: len(ids)]
    assert error.code() == grpc.StatusCode.DATA_LOSS


async def test_new_requests_go_on_during_the_search() -> None:
    supervisor = FakeSupervisor(lambda: Poisoned({"r5": 20}))
    async with (
        supervisor as address,
        scheduler(make_settings([], supervisor_addresses=[address])) as client,
    ):
        poisoned = asyncio.ensure_future(code_of(client.generate(MESSAGES[5])))
        index = NUM
        while not poisoned.done():
            message = make_request(index, 5, 10, stop_token_ids=[])
            assert (await client.generate(message)).tokens == expected(MODEL, message)
            index += 1
        assert poisoned.result().code() == grpc.StatusCode.DATA_LOSS


class Doomed(FakeWorker):
    """Stands still, for its end, in steps that may bring a request to some length."""

    def __init__(self, at: int, doomed: asyncio.Queue[None], spared: asyncio.Event) -> None:
        super().__init__(MODEL, before_step=self.look)
        self._at, self._doomed, self._spared = at, doomed, spared

    async def look(self, plan: worker_pb2.StepPlan) -> None:
        names = {slot: s.admission.request_id for slot, s in self.engine.slots.items()}
        names |= {admission.slot: admission.request_id for admission in plan.admissions}
        rows = zip(plan.slot, plan.len_hi, plan.num_tokens, plan.max_drafts, strict=True)
        for slot, high, num_tokens, max_drafts in rows:
            here = high + max(num_tokens, max_drafts + 1) >= self._at and names[slot] != "canary"
            if here and not self._spared.is_set():
                self._doomed.put_nowait(None)
                await asyncio.Event().wait()


@pytest.mark.parametrize(
    ("death", "fails"),
    [
        (Death(supervisor_pb2.OUT_OF_MEMORY), True),
        (Death(supervisor_pb2.KILLED), True),  # by SIGSEGV, say
        (Death(supervisor_pb2.KILLED, outside=True), False),
        (Death(supervisor_pb2.EXITED, outside=True), False),
        (Death(supervisor_pb2.OUT_OF_MEMORY, phase=supervisor_pb2.IDLE), False),
    ],
)
async def test_what_four_deaths_at_one_spot_say_of_a_request(death: Death, fails: bool) -> None:
    """Its own doing counts in full, somebody's signals hardly, and what idle ranks end of not."""
    doomed, spared, num_deaths = asyncio.Queue[None](), asyncio.Event(), 4
    supervisor = FakeSupervisor(lambda: Doomed(20, doomed, spared))

    async def reap() -> None:
        for left in reversed(range(num_deaths)):
            await doomed.get()
            if not left:
                spared.set()
            await supervisor.lose(death.cause, death.phase, outside=death.outside)

    async with (
        supervisor as address,
        scheduler(make_settings([], supervisor_addresses=[address])) as client,
        asyncio.TaskGroup() as tasks,
    ):
        tasks.create_task(reap())
        if fails:
            error = await code_of(client.generate(MESSAGES[5]))
            assert error.code() == grpc.StatusCode.DATA_LOSS
            assert "this request ended the workers 4 times" in (error.details() or "")
        else:
            answer = await client.generate(MESSAGES[5])
            assert answer.tokens == expected(MODEL, MESSAGES[5])
        stats = await client.idle()
    assert stats.num_poisoned_requests == fails
    assert stats.num_epochs == 1 + num_deaths


async def test_what_only_drafts_or_long_chunks_do_fails_nobody() -> None:
    """A suspect that gets past in another shape goes on, with the right tokens."""

    class Fragile(FakeWorker):
        def __init__(self) -> None:
            super().__init__(MODEL, before_step=self.look)

        async def look(self, plan: worker_pb2.StepPlan) -> None:
            if any(tokens > NUM for tokens in plan.num_tokens):
                raise RuntimeError("no kernel for so many rows")

    message = make_request(0, NUM + 20, 40, stop_token_ids=[])
    supervisor = FakeSupervisor(Fragile)
    async with (
        supervisor as address,
        scheduler(make_settings([], supervisor_addresses=[address])) as client,
    ):
        answer = await client.generate(message)
        stats = await client.idle()
    assert answer.tokens == expected(MODEL, message)
    assert stats.num_poisoned_requests == 0
    assert stats.num_epochs == 1 + 3


async def test_workers_that_end_at_every_step_are_nobodys_fault() -> None:
    """Attempts become rare, requests stay open, and go on when the machine is well again."""
    broken = True

    async def dies(plan: worker_pb2.StepPlan) -> None:
        if broken:
            raise RuntimeError("uncorrectable memory error")

    async with (
        fake_worker(MODEL, before_step=dies) as worker,
        scheduler(make_settings([worker])) as client,
    ):
        calls = [asyncio.ensure_future(client.generate(message)) for message in MESSAGES]
        stats = await client.until(lambda stats: stats.num_incidents["worker_error"] >= 5)
        assert stats.num_recoveries == 0
        error = await code_of(client.generate(make_request(99), timeout_s=0.2))
        assert error.code() == grpc.StatusCode.DEADLINE_EXCEEDED  # while nothing is up
        assert not any(call.done() for call in calls)
        broken = False
        answers = await asyncio.gather(*calls)
        stats = await client.idle()
    check(list(answers), {})
    assert stats.num_poisoned_requests == 0
    assert stats.num_recoveries == sum(stats.num_incidents.values())
