"""Requests through a real scheduler and a fake worker over gRPC."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest
from support.fakes.model import FakeModel
from support.fakes.worker import fake_worker
from support.processes.scheduler_harness import (
    Client,
    Gate,
    code_of,
    expected,
    make_request,
    make_settings,
    scheduler,
    trailing,
)
from surestep_proto import sampling_pb2, worker_pb2
from surestep_proto import scheduler_pb2 as pb

MODEL = FakeModel()
OWNERS_AND_SALTS = [
    *[("", ""), ("", ""), ("", "other"), ("a", ""), ("a", ""), ("a", "b"), ("ab", "")],
    *[("", "ab"), ("", "a"), ("a", "b")],
]


@pytest.mark.parametrize("depth", [0, 1, 2])
async def test_concurrent_requests_get_their_own_tokens(depth: int) -> None:
    messages = [make_request(i, 1 + i % 40, 1 + i % 50) for i in range(64)]
    async with (
        fake_worker(MODEL) as worker,
        scheduler(make_settings([worker], pipeline_depth=depth)) as client,
    ):
        answers = await asyncio.gather(*map(client.generate, messages))
        stats = await client.idle()
    for message, answer in zip(messages, answers, strict=True):
        assert answer.tokens == expected(MODEL, message)
    assert stats.num_blocks_used == 0
    assert stats.generation_tokens == sum(len(answer.tokens) for answer in answers)
    assert stats.num_accepted_tokens == sum(answer.end.num_accepted_tokens for answer in answers)
    assert stats.num_accepted_tokens == sum(stats.num_accepted_tokens_per_pos) > 0
    assert set(stats.finished_requests) <= {"stop", "length"}


async def test_cancelled_calls_free_everything() -> None:
    gate = Gate(epoch=1, steps=6)
    async with (
        fake_worker(MODEL, before_step=gate) as worker,
        scheduler(make_settings([worker])) as client,
    ):
        calls = [
            client.stub.Generate(make_request(i, max_tokens=90, stop_token_ids=[]))
            for i in range(30)
        ]
        survivor = client.stub.Generate(make_request(99, stop_token_ids=[]))
        await calls[0].read()
        await gate.reached.wait()
        await client.until(lambda stats: stats.num_running + stats.num_waiting == 31)
        for call in calls:
            call.cancel()
        gate.opened.set()
        tokens = [token async for chunk in survivor for token in chunk.token_ids]
        stats = await client.idle()
    assert tokens == expected(MODEL, make_request(99, stop_token_ids=[]))
    assert stats.num_aborted_requests == 30
    assert stats.num_blocks_used == 0


async def test_a_full_queue_refuses() -> None:
    gate = Gate(epoch=1, steps=0)
    async with (
        fake_worker(MODEL, before_step=gate) as worker,
        scheduler(make_settings([worker], max_num_seqs=1, max_queue_len=3)) as client,
    ):
        first = asyncio.ensure_future(client.generate(make_request(0)))
        await gate.reached.wait()
        more = [asyncio.ensure_future(client.generate(make_request(i))) for i in range(1, 4)]
        await client.until(lambda stats: stats.num_waiting == 3)
        error = await code_of(client.generate(make_request(4)))
        assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert float(trailing(error)["retry-after"]) >= 1
        gate.opened.set()
        answers = await asyncio.gather(first, *more)
        assert (await client.stats()).num_rejected_requests == 1
    assert [a.tokens for a in answers] == [expected(MODEL, make_request(i)) for i in range(4)]


async def test_a_deadline_ends_the_request() -> None:
    gate = Gate(epoch=1, steps=2)
    async with (
        fake_worker(MODEL, before_step=gate) as worker,
        scheduler(make_settings([worker])) as client,
    ):
        error = await code_of(client.generate(make_request(0, stop_token_ids=[]), timeout_s=0.3))
        assert error.code() == grpc.StatusCode.DEADLINE_EXCEEDED
        gate.opened.set()
        stats = await client.idle()
        assert stats.finished_requests == {"abort": 1}


async def test_bad_logits_end_one_request_only() -> None:
    def status_of(request_id: str, known: int) -> worker_pb2.RowStatus:
        return worker_pb2.NON_FINITE if request_id == "r2" and known > 14 else worker_pb2.OK

    async with (
        fake_worker(MODEL, status_of=status_of) as worker,
        scheduler(make_settings([worker])) as client,
    ):
        messages = [make_request(i, stop_token_ids=[]) for i in range(5)]
        results = await asyncio.gather(*map(client.generate, messages), return_exceptions=True)
        stats = await client.idle()
    for index, (message, result) in enumerate(zip(messages, results, strict=True)):
        if index == 2:
            assert isinstance(result, grpc.aio.AioRpcError)
            assert result.code() == grpc.StatusCode.DATA_LOSS
        else:
            assert not isinstance(result, BaseException)
            assert result.tokens == expected(MODEL, message)
    assert stats.finished_requests == {"length": 4, "error": 1}


async def test_logprobs_come_with_their_tokens() -> None:
    sampling = {"want_logprobs": True, "num_top_logprobs": 2, "want_prompt_logprobs": True}
    message = make_request(1, length=90, max_tokens=12, stop_token_ids=[], **sampling)
    async with fake_worker(MODEL) as worker, scheduler(make_settings([worker])) as client:
        # A cached prefix has no logits, so that it must not be used here.
        warm = make_request(2, length=90)
        warm.prompt_ids[:] = message.prompt_ids
        await client.generate(warm)
        answer = await client.generate(message)
    first = answer.chunks[0]
    assert list(first.prompt_logprobs.row) == list(range(1, 90))
    assert list(first.prompt_logprobs.token_id) == list(message.prompt_ids[1:])
    for chunk in answer.chunks:
        assert list(chunk.logprobs.token_id) == list(chunk.token_ids)
        assert list(chunk.logprobs.row) == list(range(len(chunk.token_ids)))
        assert set(chunk.logprobs.num_top) == {2}
        assert len(chunk.logprobs.top_token_ids) == 2 * len(chunk.token_ids)
    assert sum(chunk.HasField("prompt_logprobs") for chunk in answer.chunks) == 1


async def test_a_shared_prefix_is_computed_once() -> None:
    async with fake_worker(MODEL) as worker, scheduler(make_settings([worker])) as client:
        cached = []
        for index, (owner, salt) in enumerate(OWNERS_AND_SALTS):
            message = make_request(index, length=41)
            message.prompt_ids[:] = range(41)
            message.cache_owner, message.cache_salt = owner, salt
            answer = await client.generate(message)
            assert answer.tokens == expected(MODEL, message)
            cached.append(answer.chunks[0].start.num_cached_tokens)
    seen = [pair in OWNERS_AND_SALTS[:index] for index, pair in enumerate(OWNERS_AND_SALTS)]
    assert cached == [40 * known for known in seen]


async def test_a_scheduler_that_shares_knows_one_owner() -> None:
    settings = {"share_prefix_cache_between_keys": True}
    async with (
        fake_worker(MODEL) as worker,
        scheduler(make_settings([worker], **settings)) as client,
    ):
        cached = []
        for index, (owner, salt) in enumerate([("a", ""), ("b", ""), ("b", "c")]):
            message = make_request(index, length=41)
            message.prompt_ids[:] = range(41)
            message.cache_owner, message.cache_salt = owner, salt
            answer = await client.generate(message)
            cached.append(answer.chunks[0].start.num_cached_tokens)
    assert cached == [0, 40, 0]


async def test_no_drafts_for_a_request_that_wants_none() -> None:
    message = make_request(1, max_tokens=40, stop_token_ids=[])
    message.num_draft_tokens = 0
    async with fake_worker(MODEL) as worker, scheduler(make_settings([worker])) as client:
        answer = await client.generate(message)
    assert answer.tokens == expected(MODEL, message)
    assert answer.end.num_draft_tokens == 0
    assert answer.end.num_steps == 40


async def test_a_request_goes_on_where_another_scheduler_left_it() -> None:
    whole = make_request(1, max_tokens=30, stop_token_ids=[])
    tokens = expected(MODEL, whole)
    async with fake_worker(MODEL) as worker, scheduler(make_settings([worker])) as client:
        resumed = make_request(1, max_tokens=30, stop_token_ids=[])
        resumed.emitted_ids[:] = tokens[:13]
        assert (await client.generate(resumed)).tokens == tokens[13:]
        resumed.emitted_ids[:] = tokens
        answer = await client.generate(resumed)
        assert answer.tokens == []
        assert answer.chunks[-1].finish_reason == pb.LENGTH
        resumed.sampling.stop_token_ids[:] = [tokens[4]]
        resumed.emitted_ids[:] = tokens[:5]
        assert (await client.generate(resumed)).chunks[-1].finish_reason == pb.STOP


@pytest.mark.parametrize(
    ("param", "changes"),
    [
        ("request_id", {"request_id": ""}),
        ("prompt_ids", {"prompt_ids": []}),
        ("prompt_ids", {"prompt_ids": [101]}),
        ("max_tokens", {"max_tokens": 0}),
        ("temperature", {"temperature": -1}),
        ("temperature", {"temperature": float("nan")}),
        ("top_p", {"top_p": 0}),
        ("top_p", {"top_p": 1.5}),
        ("min_p", {"min_p": 2}),
        ("repetition_penalty", {"repetition_penalty": 0}),
        ("presence_penalty", {"presence_penalty": 3}),
        ("frequency_penalty", {"frequency_penalty": -3}),
        ("num_top_logprobs", {"num_top_logprobs": 1000}),
        ("stop_token_ids", {"stop_token_ids": [101]}),
        ("allowed_token_ids", {"allowed_token_ids": [500]}),
        ("logit_bias", {"logit_bias": {7: float("inf")}}),
        ("bad_words", {"bad_words": [sampling_pb2.TokenSequence()]}),
    ],
)
async def test_bad_requests_name_the_parameter(
    refusing: Client, param: str, changes: dict[str, Any]
) -> None:
    fields = pb.GenerateRequest.DESCRIPTOR.fields_by_name
    outer = {name: value for name, value in changes.items() if name in fields}
    inner = {name: value for name, value in changes.items() if name not in fields}
    message = make_request(1, **inner)
    for name, value in outer.items():
        message.ClearField(name)
        message.MergeFrom(pb.GenerateRequest(**{name: value}))
    error = await code_of(refusing.generate(message))
    assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert trailing(error)["surestep-param"] == param


async def test_a_prompt_without_room_for_output_is_too_large(refusing: Client) -> None:
    error = await code_of(refusing.generate(make_request(1, length=MODEL.max_model_len)))
    assert error.code() == grpc.StatusCode.OUT_OF_RANGE


async def test_an_open_id_is_refused(refusing: Client) -> None:
    call = refusing.stub.Generate(make_request(1, max_tokens=100, stop_token_ids=[]))
    await call.read()
    error = await code_of(refusing.generate(make_request(1)))
    assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
    call.cancel()


@pytest.fixture
async def refusing() -> Any:
    async with fake_worker(MODEL) as worker, scheduler(make_settings([worker])) as client:
        yield client


@pytest.mark.parametrize("wanted", [False, True])
async def test_drafted_tokens_are_told_to_those_who_ask(wanted: bool) -> None:
    message = make_request(3, 20, 60, stop_token_ids=[])
    message.want_drafted = wanted
    async with fake_worker(MODEL) as worker, scheduler(make_settings([worker])) as client:
        chunks = [chunk async for chunk in client.stub.Generate(message)]
    drafted = [one for chunk in chunks for one in chunk.drafted]
    assert all(len(chunk.drafted) in (0, len(chunk.token_ids)) for chunk in chunks)
    end = chunks[-1].end
    assert end.num_accepted_tokens > 0
    assert len(drafted) == (60 if wanted else 0)
    assert sum(drafted) == (end.num_accepted_tokens if wanted else 0)
    assert len(drafted) - sum(drafted) in ((end.num_steps, end.num_steps - 1) if wanted else (0,))


async def test_the_latest_steps_are_listed_if_asked_for() -> None:
    async with fake_worker(MODEL) as worker, scheduler(make_settings([worker])) as client:
        await client.generate(make_request(1, 20, 60, stop_token_ids=[]))
        stats = await client.idle()
        plain = await client.stub.Status(pb.SchedulerStatusRequest())
        some = (await client.stub.Status(pb.SchedulerStatusRequest(num_steps=5))).recent_steps
        steps = (await client.stub.Status(pb.SchedulerStatusRequest(num_steps=9999))).recent_steps
    assert not plain.HasField("recent_steps")
    assert len({len(column) for _, column in steps.ListFields()}) == 1
    assert list(steps.step) == list(range(1, stats.num_steps + 1))
    assert list(some.step) == list(steps.step)[-5:]
    assert set(steps.epoch) == {1}
    assert list(steps.age_s) == sorted(steps.age_s, reverse=True)
    assert all(took > 0 for took in steps.took_s)
    assert steps.prompt_rows[0] == 1
    assert sum(steps.num_emitted) == stats.generation_tokens
    assert sum(steps.num_accepted) == stats.num_accepted_tokens > 0
    rows = stats.steps.num_rows_by_mode
    assert sum(steps.verify_rows) == rows["verify"]
    assert sum(steps.decode_rows) == rows["decode"]
