"""Several schedulers behind one gateway: who gets a request, and who goes on with it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable

import pytest
from support.fakes.scheduler import FakeScheduler, emulated, emulating, failing, start, tokens
from support.processes.gateway_stack import Paused, Stack, StartStack
from surestep_common.errors import InternalError, InvalidRequest, QueueFull, Unavailable
from surestep_gateway.schedulers import scheduler_client
from surestep_gateway.schedulers.losses import BreakerState
from surestep_proto.scheduler_pb2 import LENGTH, GenerateChunk, GenerateRequest

CHAT = "/v1/chat/completions"


def asked(stack: Stack) -> list[int]:
    """Calls that each scheduler has had."""
    return [len(scheduler.requests) for scheduler in stack.schedulers]


async def lone(stack: Stack, count: Callable[[FakeScheduler], int]) -> FakeScheduler:
    """The one scheduler for which `count` is not 0, when there is one."""
    async with asyncio.timeout(10):
        while sum(map(count, stack.schedulers)) == 0:
            await asyncio.sleep(0.001)
    (found,) = [scheduler for scheduler in stack.schedulers if count(scheduler)]
    return found


def both(stack: Stack, script: Callable[[GenerateRequest], AsyncIterator[GenerateChunk]]) -> None:
    for scheduler in stack.schedulers:
        scheduler.script = script


async def test_equal_prefixes_go_to_one_scheduler(start_stack: StartStack) -> None:
    stack = await start_stack(replicas=3)
    for _ in range(6):
        await stack.complete(max_tokens=1)
    assert sorted(asked(stack)) == [0, 0, 6]
    for number in range(24):
        await stack.complete(max_tokens=1, cache_salt=str(number))
    assert all(asked(stack))


async def test_a_busy_scheduler_is_spared(start_stack: StartStack) -> None:
    stack = await start_stack(replicas=2)
    go = asyncio.Event()

    async def script(request: GenerateRequest) -> AsyncIterator[GenerateChunk]:
        yield start()
        async with asyncio.timeout(30):
            await go.wait()
        yield tokens(emulated(request), finish=LENGTH)

    both(stack, script)
    async with asyncio.TaskGroup() as group:
        for number in range(1, 13):
            group.create_task(stack.complete(max_tokens=1))
            async with asyncio.timeout(10):
                while sum(asked(stack)) < number:
                    await asyncio.sleep(0.001)
        go.set()
    assert sorted(asked(stack)) == [3, 9]


async def test_a_stream_goes_on_at_another_scheduler(start_stack: StartStack) -> None:
    stack = await start_stack(replicas=2)
    lost = asyncio.Event()

    async def script(request: GenerateRequest) -> AsyncIterator[GenerateChunk]:
        yield start()
        for token in emulated(request)[:3]:
            yield tokens([token])
        async with asyncio.timeout(30):
            await lost.wait()

    both(stack, script)
    async with asyncio.TaskGroup() as group:
        reader = group.create_task(
            stack.stream("/v1/completions", prompt="x", max_tokens=9, seed=4, return_token_ids=True)
        )
        first = await lone(stack, lambda scheduler: scheduler.num_open)
        (second,) = [scheduler for scheduler in stack.schedulers if scheduler is not first]
        second.script = emulating
        await asyncio.sleep(0.05)  # let tokens pass; any number of them will do
        await first.stop()
        lost.set()
    events = reader.result()
    assert events.done
    ids = [i for choice in events.choices() for i in choice.get("token_ids", ())]
    assert ids == emulated(first.requests[0])
    (request,) = second.requests
    assert list(request.emitted_ids) == ids[: len(request.emitted_ids)]
    found = (await stack.client.get("/metrics")).text
    assert "surestep:resumed_requests_total 1.0" in found
    sent = len(request.prompt_ids) + len(request.emitted_ids)
    assert f"surestep:resumed_tokens_total {sent}.0" in found


async def test_a_full_queue_sends_to_another(start_stack: StartStack) -> None:
    stack = await start_stack(replicas=2)
    await stack.complete(max_tokens=1)
    first = await lone(stack, lambda scheduler: len(scheduler.requests))
    first.script = failing(QueueFull("the queue is full", retry_after=3))
    assert (await stack.complete(max_tokens=1)).status_code == 200
    assert asked(stack) in ([2, 1], [1, 2])


async def test_full_queues_everywhere_are_429(start_stack: StartStack) -> None:
    stack = await start_stack(replicas=3)
    both(stack, failing(QueueFull("the queue is full", retry_after=3)))
    response = await stack.complete(max_tokens=1)
    assert response.status_code == 429
    assert response.headers["retry-after"] == "3"
    assert sorted(asked(stack)) == [0, 1, 1]


async def test_a_scheduler_that_fails_is_left_alone(start_stack: StartStack) -> None:
    stack = await start_stack(replicas=2)
    await stack.complete(max_tokens=1)
    first = await lone(stack, lambda scheduler: len(scheduler.requests))
    first.script = failing(InternalError("broken"))
    for _ in range(3):
        assert (await stack.complete(max_tokens=1)).status_code == 500
    assert (await stack.complete(max_tokens=1)).status_code == 200
    address = f"127.0.0.1:{first.port}"
    states = {s["url"]: s["circuit_breaker"] for s in await schedulers(stack)}
    assert states.pop(address) == "OPEN"
    assert list(states.values()) == ["CLOSED"]
    metrics = (await stack.client.get("/metrics")).text
    assert f'surestep:circuit_breaker_state{{scheduler="{address}"}} 2.0' in metrics
    first.script = emulating
    async with asyncio.timeout(10):
        while {s["circuit_breaker"] for s in await schedulers(stack)} != {"CLOSED"}:
            assert (await stack.complete(max_tokens=1)).status_code == 200


async def schedulers(stack: Stack) -> list[dict[str, object]]:
    found: list[dict[str, object]] = (await stack.client.get("/status")).json()["schedulers"]
    return found


@pytest.mark.parametrize(
    ("error", "status"), [(InvalidRequest("no"), 400), (QueueFull("full"), 429)], ids=str
)
async def test_what_clients_do_wrong_opens_no_breaker(
    stack: Stack, error: Exception, status: int
) -> None:
    stack.scheduler.script = failing(error)
    for _ in range(10):
        assert (await stack.complete()).status_code == status
    (link,) = stack.server.gateway.pool.schedulers
    assert link.breaker.state(0) is BreakerState.CLOSED


async def test_a_silent_scheduler_is_left(start_stack: StartStack) -> None:
    """Its connection stays up, its calls bring nothing, and it gives no answer to questions."""
    stack = await start_stack(replicas=2)

    async def script(request: GenerateRequest) -> AsyncIterator[GenerateChunk]:
        yield start()
        yield tokens(emulated(request)[:3])
        await asyncio.sleep(60)

    both(stack, script)
    async with asyncio.TaskGroup() as group:
        reader = group.create_task(
            stack.stream("/v1/completions", prompt="x", max_tokens=9, seed=4, return_token_ids=True)
        )
        first = await lone(stack, lambda scheduler: scheduler.num_open)
        (second,) = [scheduler for scheduler in stack.schedulers if scheduler is not first]
        second.script = emulating
        began = time.monotonic()
        first.hanging = True
    assert time.monotonic() - began < 10
    ids = [i for choice in reader.result().choices() for i in choice.get("token_ids", ())]
    assert ids == emulated(first.requests[0])
    assert len(second.requests) == 1
    await first.until(lambda fake: fake.num_open == 0)
    await stack.until_serving(1)
    first.hanging = False
    await stack.until_serving(2)


@pytest.mark.parametrize("others", [0, 1])
@pytest.mark.rotates(1)
async def test_a_scheduler_without_workers_is_left(
    start_stack: StartStack, others: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Have requests go on elsewhere if they can, and else wait for the workers."""
    monkeypatch.setattr(scheduler_client, "_HELPLESS_S", 0.2)
    stack = await start_stack(replicas=1 + others)
    paused = Paused(3)
    both(stack, paused)
    body = {"prompt": "x", "max_tokens": 9, "seed": 4, "return_token_ids": True}
    async with asyncio.TaskGroup() as group:
        reader = group.create_task(stack.stream("/v1/completions", **body))
        first = await lone(stack, lambda scheduler: scheduler.num_open)
        await paused.sent.wait()
        for other in stack.schedulers:
            if other is not first:
                other.script = emulating
        first.trouble = "rank 0 is starting"
        await first.set_serving(False)
        asked_before = first.num_info
        await first.until(lambda fake: fake.num_info > asked_before + 3, timeout_s=60)
        assert first.num_open == 1 - others
        first.trouble = ""
        paused.go.set()
    ids = [i for choice in reader.result().choices() for i in choice.get("token_ids", ())]
    assert ids == emulated(first.requests[0])
    assert sum(asked(stack)) == 1 + others


async def test_a_new_request_waits_for_a_scheduler(start_stack: StartStack) -> None:
    stack = await start_stack(admission_timeout_s=20)
    await stack.scheduler.set_serving(False)
    await stack.until_serving(0)
    async with asyncio.TaskGroup() as group:
        task = group.create_task(stack.stream(CHAT, messages=[{"role": "user", "content": "x"}]))
        await asyncio.sleep(0.05)
        assert not stack.scheduler.requests
        await stack.scheduler.set_serving(True)
    assert task.result().done


@pytest.mark.parametrize("comes_back", [True, False])
@pytest.mark.rotates(3)
async def test_a_new_request_outlasts_a_drain(start_stack: StartStack, comes_back: bool) -> None:
    """The time to wait for a scheduler begins when the one that drains is gone."""
    stack = await start_stack(admission_timeout_s=2.5)
    await stack.scheduler.drain()
    await stack.until_serving(0)
    asked = stack.scheduler.num_info
    async with asyncio.TaskGroup() as group:
        task = group.create_task(stack.complete(max_tokens=2))
        # The gateway asks once a second: longer than --admission-timeout-s.
        await stack.scheduler.until(lambda fake: fake.num_info == asked + 5, timeout_s=60)
        assert not task.done()
        await stack.scheduler.stop()
        if comes_back:
            await stack.scheduler.start()
    assert task.result().status_code == (200 if comes_back else 503)


async def test_a_new_request_goes_to_the_scheduler_that_does_not_drain(
    start_stack: StartStack,
) -> None:
    stack = await start_stack(replicas=2)
    await stack.complete(max_tokens=1)
    first = await lone(stack, lambda scheduler: len(scheduler.requests))
    (second,) = [scheduler for scheduler in stack.schedulers if scheduler is not first]
    first.script = failing(Unavailable("the scheduler is shutting down"))
    await first.drain()
    for _ in range(3):  # the first may come before the gateway knows
        assert (await stack.complete(max_tokens=1)).status_code == 200
    assert len(second.requests) == 3


async def test_a_scheduler_that_refuses_for_ever(stack: Stack) -> None:
    stack.scheduler.script = failing(Unavailable("no worker is ready", retry_after=2))
    response = await stack.chat()
    assert response.status_code == 503
    assert response.headers["retry-after"] == "2"
    assert len(stack.scheduler.requests) == 6
