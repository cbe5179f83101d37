"""Workers that come back with another model or other sizes: what was open goes on or says why."""

from __future__ import annotations

import asyncio
import threading
from array import array
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import NamedTuple

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
    trailing,
)
from surestep_proto import scheduler_pb2 as pb
from surestep_scheduler.cache.prefix import PrefixChain

MODEL = FakeModel()
OTHER = FakeModel(fingerprint="other", salt=1)
MESSAGES = [make_request(i, 1 + i, 90, stop_token_ids=[]) for i in range(24)]  # 16 slots


class Change(NamedTuple):
    """A scheduler whose workers were lost in the middle and came back as others."""

    client: Client
    calls: list[asyncio.Task[Answer | grpc.aio.AioRpcError]]


async def outcome(client: Client, message: pb.GenerateRequest) -> Answer | grpc.aio.AioRpcError:
    try:
        return await client.generate(message)
    except grpc.aio.AioRpcError as error:
        return error


@asynccontextmanager
async def changed(before: FakeModel, after: FakeModel) -> AsyncIterator[Change]:
    """All requests are open; some run and have tokens, others wait."""
    gate = Gate(epoch=1, steps=12)
    models = iter([before, after])
    supervisor = FakeSupervisor(lambda: FakeWorker(next(models, after), before_step=gate))
    async with supervisor as address:
        settings = make_settings([], supervisor_addresses=[address])
        async with scheduler(settings) as client:
            calls = [asyncio.ensure_future(outcome(client, message)) for message in MESSAGES]
            await gate.reached.wait()
            await client.until(lambda stats: stats.num_running + stats.num_waiting == 24)
            await supervisor.lose()
            yield Change(client, calls)


async def test_requests_with_tokens_end_when_the_model_has_changed() -> None:
    async with changed(MODEL, OTHER) as change:
        answers = await asyncio.gather(*change.calls)
        errors = [answer for answer in answers if isinstance(answer, grpc.aio.AioRpcError)]
        assert {error.code() for error in errors} == {grpc.StatusCode.FAILED_PRECONDITION}
        assert {trailing(error)["surestep-error"] for error in errors} == {"ModelChanged"}
        assert errors[0].details() == "the workers serve another model now"
        went_on = 0
        for message, answer in zip(MESSAGES, answers, strict=True):
            if isinstance(answer, Answer):  # had no token yet: the new model's, from the first
                assert answer.tokens == expected(OTHER, message)
                assert answer.chunks[0].start.model_fingerprint == "other"
                went_on += 1
        assert 0 < went_on < len(MESSAGES)
        fresh = make_request(99, 5, 40)
        assert (await change.client.generate(fresh)).tokens == expected(OTHER, fresh)
        stats = await change.client.idle()
        assert stats.finished_requests["error"] == len(errors)
        assert stats.num_epochs == 2


async def test_another_vocabulary_ends_everything_that_is_open() -> None:
    async with changed(MODEL, replace(OTHER, vocab_size=55)) as change:
        answers = await asyncio.gather(*change.calls)
        assert all(isinstance(answer, grpc.aio.AioRpcError) for answer in answers)
        fresh = pb.GenerateRequest(
            request_id="fresh", prompt_ids=[54], max_tokens=9, sampling=MESSAGES[0].sampling
        )
        assert len((await change.client.generate(fresh)).tokens) == 9
        with_old_id = make_request(1, 1, 9)
        with_old_id.prompt_ids[0] = 55
        error = await code_of(change.client.generate(with_old_id))
        assert error.code() == grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize("after", [replace(MODEL, block_size=8), replace(MODEL, num_slots=3)])
async def test_other_sizes_change_no_token(after: FakeModel) -> None:
    async with changed(MODEL, after) as change:
        answers = await asyncio.gather(*change.calls)
        for message, answer in zip(MESSAGES, answers, strict=True):
            assert isinstance(answer, Answer), answer
            assert answer.tokens == expected(MODEL, message)
        assert (await change.client.idle()).num_blocks_used == 0


async def test_less_room_ends_what_does_not_fit_and_shortens_the_rest() -> None:
    small = replace(MODEL, num_blocks=6)  # 5 blocks of 4: 21 tokens
    async with changed(MODEL, small) as change:
        answers = await asyncio.gather(*change.calls)
        limit, refused = 21, 0
        for message, answer in zip(MESSAGES, answers, strict=True):
            if isinstance(answer, grpc.aio.AioRpcError):
                assert answer.code() == grpc.StatusCode.OUT_OF_RANGE
                assert "the workers came back with room for 21" in str(answer.details())
                refused += 1
            else:
                fits = expected(MODEL, message)[: limit - len(message.prompt_ids)]
                assert answer.tokens == fits
                assert answer.chunks[-1].finish_reason == pb.LENGTH
        assert 0 < refused < len(MESSAGES)
        await change.client.idle()


async def test_ranks_with_different_models_are_refused_in_a_line() -> None:
    async with (
        fake_worker(MODEL, world_size=2) as first,
        fake_worker(OTHER, rank=1, world_size=2) as second,
        scheduler(make_settings([first, second]), serving=False) as client,
    ):
        async with asyncio.timeout(20):
            while "another model_fingerprint" not in (status := await status_of(client)):
                await asyncio.sleep(0.02)
        assert status == (
            "rank 1 (fake) has another model_fingerprint than rank 0 (fake): other, not fake"
        )
        error = await code_of(client.stub.Info(pb.SchedulerInfoRequest(), timeout=5))
        assert error.code() == grpc.StatusCode.UNAVAILABLE
        assert status in str(error.details())


async def status_of(client: Client) -> str:
    status = await client.stub.Status(pb.SchedulerStatusRequest(), timeout=5)
    return str(status.waiting_for)


async def test_the_reason_of_a_rank_that_cannot_start_is_passed_on() -> None:
    supervisor = FakeSupervisor(lambda: FakeWorker(MODEL))
    async with (
        supervisor as address,
        scheduler(make_settings([], supervisor_addresses=[address])) as client,
    ):
        assert await status_of(client) == ""
        supervisor.may_start.clear()
        supervisor.failure = "model.safetensors: cut off"
        await supervisor.lose()
        wanted = "rank 0 is dead: model.safetensors: cut off"
        async with asyncio.timeout(20):
            while await status_of(client) != wanted:
                await asyncio.sleep(0.02)
        error = await code_of(client.stub.Info(pb.SchedulerInfoRequest(), timeout=5))
        assert wanted in str(error.details())
        supervisor.may_start.set()
        await client.health()
        assert await status_of(client) == ""


@pytest.mark.parametrize(("begun_with", "accepted"), [("fake", True), ("", True), ("x", False)])
async def test_a_resumed_request_says_which_model_began_it(begun_with: str, accepted: bool) -> None:
    message = make_request(3, 8, 30, stop_token_ids=[])
    wanted = expected(MODEL, message)
    message.emitted_ids.extend(wanted[:10])
    message.model_fingerprint = begun_with
    async with fake_worker(MODEL) as worker, scheduler(make_settings([worker])) as client:
        info = await client.stub.Info(pb.SchedulerInfoRequest(), timeout=5)
        assert info.model_fingerprint == "fake"
        if accepted:
            answer = await client.generate(message)
            assert answer.tokens == wanted[10:]
            assert answer.chunks[0].start.model_fingerprint == "fake"
        else:
            error = await code_of(client.generate(message))
            assert error.code() == grpc.StatusCode.FAILED_PRECONDITION


LARGE = FakeModel(num_blocks=20_000, max_model_len=20_000, max_step_tokens=8192)


@pytest.mark.parametrize(
    ("after", "code"),
    [
        (LARGE, None),
        (replace(LARGE, block_size=16), None),
        (replace(LARGE, block_size=2), None),
        (replace(LARGE, num_blocks=100), grpc.StatusCode.OUT_OF_RANGE),
        (replace(LARGE, fingerprint="other", salt=1), grpc.StatusCode.FAILED_PRECONDITION),
    ],
)
async def test_workers_may_change_while_a_prompt_is_hashed(
    monkeypatch: pytest.MonkeyPatch, after: FakeModel, code: grpc.StatusCode | None
) -> None:
    reached, go_on, extend = threading.Event(), threading.Event(), PrefixChain.extend

    def held(self: PrefixChain, tokens: array[int]) -> None:
        reached.set()
        assert go_on.wait(20)
        extend(self, tokens)

    monkeypatch.setattr(PrefixChain, "extend", held)
    message, models = make_request(1, 17_000, 20), iter([LARGE, after])
    supervisor = FakeSupervisor(lambda: FakeWorker(next(models)))
    async with supervisor as address:
        settings = make_settings([], supervisor_addresses=[address], max_num_batched_tokens=8192)
        async with scheduler(settings) as client:
            call = asyncio.ensure_future(outcome(client, message))
            await asyncio.to_thread(reached.wait)
            await supervisor.lose()
            await client.until(lambda stats: stats.num_epochs == 2)
            go_on.set()
            answer = await call
            if isinstance(answer, Answer):
                assert (code, answer.tokens) == (None, expected(after, message))
            else:
                assert answer.code() == code
            other = make_request(2)
            assert (await client.generate(other)).tokens == expected(after, other)
