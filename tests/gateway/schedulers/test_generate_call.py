"""Chunks of all calls on one stream of the scheduler, and what happens when it breaks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from support.fakes.scheduler import (
    emulated,
    emulating,
    failing,
    logprob_columns,
    start,
    tokens,
)
from support.patience import PATIENCE_S
from support.processes.gateway_stack import Paused, Stack, StartStack
from surestep_common.errors import ConnectionLost, ModelFault
from surestep_gateway.schedulers.generate_call import GenerateCall
from surestep_proto.scheduler_pb2 import LENGTH, GenerateChunk, GenerateRequest

ASKED = {"max_tokens": 8, "seed": 3, "return_token_ids": True}


async def delivering(stack: Stack) -> None:
    """Wait until the scheduler may be told to use its stream."""
    client = stack.server.gateway.pool.schedulers[0]
    async with asyncio.timeout(PATIENCE_S):
        while client.delivery.of(1) is None:
            await asyncio.sleep(0.005)


def ids_of(response: dict[str, list[dict[str, list[int]]]]) -> list[int]:
    """The tokens of the only choice."""
    return response["choices"][0]["token_ids"]


async def test_calls_name_the_stream_each_with_a_number_of_its_own(stack: Stack) -> None:
    await delivering(stack)
    answers = await asyncio.gather(*(stack.complete(**ASKED | {"seed": i}) for i in range(20)))
    requests = stack.scheduler.requests
    for answer, request in zip(answers, sorted(requests, key=_seed), strict=True):
        assert ids_of(answer.json()) == emulated(request)
    assert len({request.delivery.stream_id for request in requests}) == 1
    assert len({request.delivery.call for request in requests}) == 20


def _seed(request: GenerateRequest) -> int:
    return request.sampling.seed


async def test_a_scheduler_without_such_a_stream_sends_chunks_by_the_calls(
    start_stack: StartStack,
) -> None:
    stack = await start_stack(delivers=False)
    answer = await stack.complete(**ASKED)
    (request,) = stack.scheduler.requests
    assert not request.HasField("delivery")
    assert ids_of(answer.json()) == emulated(request)


async def test_what_is_large_comes_by_its_call(stack: Stack) -> None:
    await delivering(stack)
    answer = await stack.complete(**ASKED, prompt_logprobs=2)
    (request,) = stack.scheduler.requests
    assert not request.HasField("delivery")
    choice = answer.json()["choices"][0]
    assert choice["token_ids"] == emulated(request)
    assert len(choice["prompt_logprobs"]) == len(request.prompt_ids)


async def test_calls_go_on_when_the_stream_breaks(stack: Stack) -> None:
    await delivering(stack)
    paused = Paused(3)
    stack.scheduler.script = paused
    call = asyncio.ensure_future(stack.complete(**ASKED))
    await paused.sent.wait()
    stack.scheduler.script = emulating
    await stack.scheduler.deliveries.break_all()
    answer = await call
    first, second = stack.scheduler.requests
    whole = emulated(first)
    assert ids_of(answer.json()) == whole
    assert list(second.emitted_ids) == whole[:3]
    await delivering(stack)
    assert ids_of((await stack.complete(**ASKED)).json()) == whole
    assert stack.scheduler.requests[-1].delivery.stream_id != first.delivery.stream_id


async def test_an_error_comes_behind_the_tokens_that_came_before(stack: Stack) -> None:
    await delivering(stack)
    stack.scheduler.script = failing(ModelFault("logits are not finite"), after=[70, 71, 72])
    events = await stack.stream("/v1/completions", prompt="hello", **ASKED)
    told = [id_ for event in events[:-1] for id_ in event["choices"][0]["token_ids"]]
    assert told == [70, 71, 72]
    assert "not finite" in events[-1]["error"]["message"]


async def test_an_error_does_not_overtake_tokens(stack: Stack) -> None:
    """The call and the stream are two: what the one brings is no later than the other's end."""
    await delivering(stack)
    ids = list(range(70, 100))

    async def script(request: GenerateRequest) -> AsyncIterator[GenerateChunk]:
        yield start()
        for id_ in ids:
            yield tokens([id_])
        raise ModelFault("logits are not finite")

    stack.scheduler.script = script
    asked = ASKED | {"max_tokens": len(ids) + 1, "prompt": "hello"}
    streams = (stack.stream("/v1/completions", **asked) for _ in range(20))
    for *events, last in await asyncio.gather(*streams):
        assert "not finite" in last["error"]["message"]
        assert [id_ for event in events for id_ in event["choices"][0]["token_ids"]] == ids


@pytest.mark.parametrize("lost", [False, True], ids=["comes", "is lost"])
async def test_an_error_waits_for_the_chunk_before_it(stack: Stack, lost: bool) -> None:
    await delivering(stack)
    client = stack.server.gateway.pool.schedulers[0]
    stack.scheduler.script = Paused(1)
    with client.generate(GenerateRequest(request_id="r", prompt_ids=[1]), 60) as call:
        assert (await _read(call)).HasField("start")
        assert (await _read(call)).token_ids
        call.fail(ModelFault("logits are not finite"), behind=3)
        reading = asyncio.ensure_future(_read(call))
        await asyncio.sleep(0)
        assert not reading.done()
        if lost:
            call.fail(ConnectionLost("the stream of chunks broke"))
        else:
            call.put(tokens([9]))
            assert (await reading).token_ids == [9]
            reading = asyncio.ensure_future(_read(call))
        with pytest.raises(ModelFault):
            await reading


async def test_a_client_that_is_gone_ends_its_call_and_no_other(stack: Stack) -> None:
    await delivering(stack)
    paused = Paused(2)
    stack.scheduler.script = paused
    gone = asyncio.ensure_future(stack.complete(**ASKED))
    await paused.sent.wait()
    paused.sent.clear()
    stays = asyncio.ensure_future(stack.complete(**ASKED | {"seed": 4}))
    await paused.sent.wait()
    gone.cancel()
    await stack.scheduler.until(lambda scheduler: scheduler.num_cancelled == 1)
    paused.go.set()
    assert ids_of((await stays).json()) == emulated(stack.scheduler.requests[1])
    assert len(stack.scheduler.requests) == 2


@pytest.mark.parametrize("count", [1, 64, 65, 200])
async def test_chunks_that_are_not_read_are_merged(stack: Stack, count: int) -> None:
    """Of a client that hardly reads, what the gateway keeps are ids."""
    await delivering(stack)
    client = stack.server.gateway.pool.schedulers[0]
    silent = asyncio.Event()

    async def script(request: GenerateRequest) -> AsyncIterator[GenerateChunk]:
        yield start()
        await silent.wait()

    stack.scheduler.script = script
    with client.generate(GenerateRequest(request_id="r", prompt_ids=[1]), 60) as call:
        assert (await _read(call)).HasField("start")
        for index in range(count):
            last = index == count - 1
            call.put(tokens([index, index + 1], finish=LENGTH if last else 0, logprobs=True))
        chunks: list[GenerateChunk] = []
        while not chunks or not chunks[-1].finish_reason:
            chunks.append(await _read(call))
        silent.set()
    assert len(chunks) == min(count, 64)
    ids = [id_ for chunk in chunks for id_ in chunk.token_ids]
    assert ids == [id_ for index in range(count) for id_ in (index, index + 1)]
    for chunk in chunks:
        assert chunk.logprobs == logprob_columns(chunk.token_ids, num_top=2)


async def _read(call: GenerateCall) -> GenerateChunk:
    return await call.read(asyncio.get_running_loop().time() + 10)
