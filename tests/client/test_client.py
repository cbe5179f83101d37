"""surestep.client against real gRPC servers: answers, losses, errors."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
from support.clients.calls import PROMPT, SAMPLING, Generate, whole
from support.fakes.model import FakeModel
from support.fakes.scheduler import emulating, running, start, tokens
from support.fakes.worker import fake_worker
from support.processes.ports import free_address
from support.processes.scheduler_harness import Gate, make_settings
from surestep.client import AsyncClient, Client, SamplingParams
from surestep_common.errors import (
    ERROR_TABLE,
    ConnectionLost,
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    QueueFull,
    SurestepError,
    Unavailable,
)
from surestep_proto.scheduler_pb2 import LENGTH, GenerateChunk, GenerateRequest, ResolvedParams
from surestep_scheduler import server


class Losing:
    """Loses the request after so many chunks, as often as it comes until it gets this far."""

    def __init__(self, *cuts: int, error: SurestepError | None = None) -> None:
        self._cuts = list(cuts)
        self._error = error or ConnectionLost("gone")

    async def __call__(self, request: GenerateRequest) -> AsyncIterator[GenerateChunk]:
        left = self._cuts.pop(0) if self._cuts else 1 << 30
        async for chunk in emulating(request):
            if not left:
                raise self._error
            left -= 1
            if chunk.HasField("start"):
                chunk.start.model_fingerprint = "a"
                chunk.start.resolved.CopyFrom(ResolvedParams(temperature=0.5, max_tokens=12))
            yield chunk


@pytest.mark.parametrize("prefix", ["", "grpc://"])
async def test_an_answer(generate: Generate, prefix: str) -> None:
    async with running() as fake:
        sent: dict[str, Any] = {"max_tokens": 8, "priority": 2, "ignore_eos": True, "tenant": "t"}
        completion = await generate(f"{prefix}127.0.0.1:{fake.port}", **sent, timeout_s=20)
    assert completion.token_ids == whole(8)
    assert completion.finish_reason == "length"
    assert completion.end.num_steps == 1
    (request,) = fake.requests
    assert {name: getattr(request, name) for name in sent} == sent
    assert request.sampling == SAMPLING
    assert 15 < fake.time_remaining[0] < 21  # gRPC sends deadlines rounded up


async def test_what_is_not_said_is_not_sent(generate: Generate) -> None:
    async with running() as fake:
        await generate(fake, max_tokens=None, num_draft_tokens=None)
    (request,) = fake.requests
    assert not request.HasField("max_tokens")
    assert not request.HasField("num_draft_tokens")
    assert not request.sampling.HasField("top_p")


@pytest.mark.parametrize("cuts", [(0,), (1,), (2,), (5, 3), (11, 1, 1, 1)], ids=str)
async def test_a_request_goes_on_after_losses(generate: Generate, cuts: tuple[int, ...]) -> None:
    async with running(script=Losing(*cuts)) as fake:
        completion = await generate(fake, max_tokens=12)
    assert completion.token_ids == whole(12)
    assert len(fake.requests) == len(cuts) + 1
    assert len({request.request_id for request in fake.requests}) == len(fake.requests)
    begun = cuts[0] > 0
    for request in fake.requests[1:]:
        assert request.model_fingerprint == ("a" if begun else "")
        assert request.HasField("resolved") == begun
        assert list(request.emitted_ids) == whole(len(request.emitted_ids))
    assert completion.start.model_fingerprint == "a"


async def test_logprobs_are_put_together(generate: Generate) -> None:
    async with running(script=Losing(4, 3)) as fake:
        sampling = SamplingParams(seed=9, want_logprobs=True, want_prompt_logprobs=True)
        completion = await generate(fake, max_tokens=10, sampling=sampling)
    assert list(completion.logprobs.row) == list(range(10))
    assert list(completion.logprobs.token_id) == completion.token_ids
    assert list(completion.prompt_logprobs.row) == [1, 2]
    assert [request.sampling.want_prompt_logprobs for request in fake.requests[1:]] == [False] * 2


async def test_the_server_goes_away_and_comes_back(generate: Generate) -> None:
    half = asyncio.Event()

    async def script(request: GenerateRequest) -> AsyncIterator[GenerateChunk]:
        async for chunk in emulating(request):
            yield chunk
            if len(request.emitted_ids) == 0 and chunk.token_ids == whole(4)[3:]:
                half.set()
                await asyncio.sleep(3600)

    async with running(script=script) as fake, asyncio.TaskGroup() as tasks:
        answer = tasks.create_task(generate(fake, max_tokens=9))
        await half.wait()
        await fake.stop()
        await fake.start()
    assert answer.result().token_ids == whole(9)


FINAL = [
    kind
    for kind in ERROR_TABLE
    if kind.error not in (Unavailable, InternalError)
    and kind is next(first for first in ERROR_TABLE if first.code is kind.code)
]


@pytest.mark.parametrize("kind", FINAL, ids=lambda kind: kind.error.__name__)
async def test_errors_have_the_types_of_the_table(generate: Generate, kind: Any) -> None:
    error = kind.error("because", param="top_p", retry_after=2.0)
    async with running(script=Losing(0, error=error)) as fake:
        with pytest.raises(kind.error, match="because") as caught:
            await generate(fake)
        assert len(fake.requests) == 1  # what would be refused again is not tried again
    assert (caught.value.param, caught.value.retry_after) == ("top_p", 2.0)


async def test_unavailability_is_waited_for_and_not_for_ever(generate: Generate) -> None:
    busy = Unavailable("draining", retry_after=0.01)
    async with running(script=Losing(0, 0, 0, error=busy)) as fake:
        assert (await generate(fake, max_tokens=3)).token_ids == whole(3)
        assert len(fake.requests) == 4
        fake.script = Losing(0, error=busy)
        with pytest.raises(Unavailable, match="draining"):
            await generate(fake, retry_for_s=0)
        assert len(fake.requests) == 5


async def test_a_full_queue_is_waited_for_by_those_who_were_admitted(generate: Generate) -> None:
    full = QueueFull("full", retry_after=0.01)
    async with running(script=Losing(3, 0, error=full)) as fake:
        assert (await generate(fake, max_tokens=6)).token_ids == whole(6)
    assert len(fake.requests) == 3


async def test_the_time_is_over(generate: Generate) -> None:
    async def endless(request: GenerateRequest) -> AsyncIterator[GenerateChunk]:
        yield start()
        yield tokens([3])
        await asyncio.sleep(3600)

    async with running(script=endless) as fake:
        with pytest.raises(DeadlineExceeded):
            await generate(fake, timeout_s=0.3)
        await fake.until(lambda fake: fake.num_open == 0)
    with pytest.raises(Unavailable):  # nobody is there any more
        await generate(f"127.0.0.1:{fake.port}", timeout_s=0.3)


async def test_a_reader_that_leaves_aborts_its_request() -> None:
    async with running() as fake:
        async with AsyncClient(f"127.0.0.1:{fake.port}") as client:
            async with contextlib.aclosing(client.stream(PROMPT)) as chunks:
                assert (await anext(chunks)).HasField("start")
            await fake.until(lambda fake: fake.num_open == 0)

        def read_one() -> bool:
            with Client(f"127.0.0.1:{fake.port}") as client:
                chunks = client.stream(PROMPT)
                first = next(iter(chunks))
                chunks.close()
                return first.HasField("start")

        assert await asyncio.to_thread(read_one)
        await fake.until(lambda fake: fake.num_open == 0)
    assert len(fake.requests) == 2


async def test_facts_of_the_model() -> None:
    async with running() as fake:
        address = f"127.0.0.1:{fake.port}"
        async with AsyncClient(address) as client:
            assert await client.info() == fake.info
            fake.trouble = "no worker"
            with pytest.raises(Unavailable, match="no worker"):
                await client.info()

        def ask() -> None:
            with Client(address) as client, pytest.raises(Unavailable, match="no worker"):
                client.info()

        await asyncio.to_thread(ask)


async def test_real_schedulers_one_after_the_other(generate: Generate) -> None:
    """The first one stops in mid-answer; the second has other defaults."""
    model, address, gate = FakeModel(), free_address(), Gate(epoch=1, steps=5)
    model.defaults.temperature = 0.25
    other = FakeModel()
    expected = model.complete(PROMPT, 40, SAMPLING)
    flags: dict[str, Any] = {"scheduler_listen": address, "drain_timeout_s": 0.01}
    async with (
        fake_worker(model, before_step=gate) as one,
        fake_worker(other) as two,
        asyncio.TaskGroup() as tasks,
    ):
        async with server.running(make_settings([one], **flags)):
            answer = tasks.create_task(generate(address, max_tokens=40))
            await gate.reached.wait()
        async with server.running(make_settings([two], **flags)):
            completion = await answer
    assert completion.token_ids == expected
    assert completion.start.resolved.temperature == 0.5
    assert completion.end.num_steps < len(expected)


async def test_a_wrong_request_names_its_parameter(generate: Generate) -> None:
    address = free_address()
    async with (
        fake_worker(FakeModel()) as worker,
        server.running(make_settings([worker], scheduler_listen=address)),
    ):
        with pytest.raises(InvalidRequest) as caught:
            await generate(address, max_tokens=0)
    assert caught.value.param == "max_tokens"


def finishes(chunks: Sequence[GenerateChunk]) -> list[int]:
    return [chunk.finish_reason for chunk in chunks if chunk.finish_reason]


async def test_chunks_of_a_stream_that_was_lost_read_like_those_of_one_that_was_not() -> None:
    async with (
        running(script=Losing(4, 2)) as fake,
        AsyncClient(f"127.0.0.1:{fake.port}") as client,
    ):
        chunks = [chunk async for chunk in client.stream(PROMPT, SAMPLING, max_tokens=9)]
    assert [chunk.HasField("start") for chunk in chunks].count(True) == 1
    assert chunks[0].HasField("start")
    assert finishes(chunks) == [LENGTH]
    assert [id_ for chunk in chunks for id_ in chunk.token_ids] == whole(9)
