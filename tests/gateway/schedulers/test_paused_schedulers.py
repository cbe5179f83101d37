"""A scheduler that an operator has stopped: requests wait for it, or are refused, as it says."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from support.processes.gateway_stack import Paused, Stack, StartStack
from surestep_proto.scheduler_pb2 import (
    PAUSE_ABORT,
    PAUSE_KEEP,
    GenerateChunk,
    GenerateRequest,
    PauseInfo,
    PauseMode,
)

SHORT_S = 0.4  # more than a chunk takes, less than a pause does


async def pause(stack: Stack, mode: PauseMode) -> None:
    """Stop the scheduler, and wait until the gateway knows."""
    scheduler = stack.scheduler
    scheduler.trouble = "the engine is asleep"
    scheduler.stats.pause.CopyFrom(PauseInfo(level=1, mode=mode))
    await scheduler.set_serving(False)
    async with asyncio.timeout(20):
        while not stack.server.gateway.pool.schedulers[0].paused:
            await asyncio.sleep(0.005)


async def go_on(stack: Stack) -> None:
    stack.scheduler.trouble = ""
    stack.scheduler.stats.ClearField("pause")
    await stack.scheduler.set_serving(True)


@pytest.mark.parametrize("paused", [True, False])
async def test_no_token_is_late_in_a_pause(start_stack: StartStack, paused: bool) -> None:
    stack = await start_stack(inter_token_timeout_s=SHORT_S)
    script = stack.scheduler.script = Paused(3)
    asking = asyncio.ensure_future(stack.complete(max_tokens=5))
    await script.sent.wait()
    if paused:
        await pause(stack, PAUSE_KEEP)
    await asyncio.wait([asking], timeout=4 * SHORT_S)
    assert asking.done() != paused
    await go_on(stack)
    script.go.set()
    assert (await asking).status_code == (200 if paused else 504)


@pytest.mark.parametrize("mode", [PAUSE_KEEP, PAUSE_ABORT])
async def test_requests_wait_or_are_refused(start_stack: StartStack, mode: PauseMode) -> None:
    stack = await start_stack(admission_timeout_s=SHORT_S)
    await stack.until_serving()
    await pause(stack, mode)
    asking = asyncio.ensure_future(stack.complete(max_tokens=2))
    await asyncio.wait([asking], timeout=4 * SHORT_S)
    assert asking.done() == (mode == PAUSE_ABORT)
    await go_on(stack)
    answer = await asking
    assert answer.status_code == (503 if mode == PAUSE_ABORT else 200)
    assert ("the engine is asleep" in answer.text) == (mode == PAUSE_ABORT)


async def test_answers_say_where_the_weights_changed(start_stack: StartStack) -> None:
    """In a whole answer, and at the end of a stream."""
    stack = await start_stack(enable_weight_updates=True, admin_api_key="admin")
    plain = stack.scheduler.script

    async def changing(request: GenerateRequest) -> AsyncIterator[GenerateChunk]:
        number = 0
        async for chunk in plain(request):
            if number in (0, 3):
                chunk.weights.add(version=f"v{number}", model_fingerprint="m")
            number += 1
            yield chunk

    stack.scheduler.script = changing
    whole = (await stack.complete(max_tokens=6)).json()["choices"][0]
    events = await stack.stream("/v1/completions", prompt="hello", max_tokens=6)
    for choice in (whole, events[-1]["choices"][0]):
        assert choice["weight_version"] == "v3"
        assert choice["weight_versions"] == [
            {"weight_version": "v0", "first_token": 0},
            {"weight_version": "v3", "first_token": 2},
        ]
