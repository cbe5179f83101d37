"""How a gateway that is told to stop gets rid of its clients, and loses none."""

from __future__ import annotations

import asyncio

import pytest
from support.processes.gateway import readiness
from support.processes.gateway_stack import Events, Paused, StartStack

CHAT = "/v1/chat/completions"
USER = [{"role": "user", "content": "hello"}]


async def test_draining(start_stack: StartStack) -> None:
    stack = await start_stack(drain_timeout_s=20)
    stack.scheduler.script = paused = Paused(1)
    async with asyncio.TaskGroup() as group:
        task = group.create_task(stack.stream(CHAT, messages=USER, max_tokens=3))
        await stack.scheduler.until(lambda fake: fake.num_open == 1)
        stack.server.stop()
        async with asyncio.timeout(10):
            while await readiness(stack.client) != 503:
                await asyncio.sleep(0)
        refused = await stack.chat()
        assert refused.status_code == 503
        assert refused.headers["retry-after"] == "20"
        assert (await stack.client.get("/health")).status_code == 200
        paused.go.set()
    assert task.result().done


async def test_who_still_comes_is_served_while_balancers_find_out(start_stack: StartStack) -> None:
    stack = await start_stack(shutdown_delay_s=60)
    assert "connection" not in (await stack.chat(max_tokens=2)).headers
    stack.server.stop()
    async with asyncio.timeout(10):
        while await readiness(stack.client) != 503:
            await asyncio.sleep(0)
    late = await stack.chat(max_tokens=2)
    assert late.status_code == 200
    assert late.headers["connection"] == "close"
    assert (await stack.client.get("/status")).json()["gateway"]["state"] == "DRAINING"


async def test_connections_without_a_request_are_closed_before_requests_are_refused(
    start_stack: StartStack,
) -> None:
    stack = await start_stack(shutdown_delay_s=0.05, drain_timeout_s=20)
    stack.scheduler.script = paused = Paused(1)
    host, port = stack.server.address.split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
    await reader.readuntil(b"\r\n\r\n")
    async with asyncio.TaskGroup() as group:
        task = group.create_task(stack.stream(CHAT, messages=USER, max_tokens=3))
        await stack.scheduler.until(lambda fake: fake.num_open == 1)
        stack.server.stop()
        async with asyncio.timeout(10):
            assert await reader.read() == b""
        assert (await stack.chat()).status_code == 503
        paused.go.set()
    assert task.result().done
    writer.close()


@pytest.mark.parametrize("stream", [True, False])
async def test_draining_has_an_end(start_stack: StartStack, stream: bool) -> None:
    stack = await start_stack(drain_timeout_s=0.05)
    stack.scheduler.script = Paused(1)
    async with asyncio.TaskGroup() as group:
        task = group.create_task(stack.chat(stream=stream, max_tokens=3))
        await stack.scheduler.until(lambda fake: fake.num_open == 1)
        stack.server.stop()
    response = task.result()
    if stream:
        events = Events.parse(response.text)
        assert not events.done
        assert events[-1]["error"]["code"] == "service_unavailable"
    else:
        assert response.status_code == 503
    await stack.scheduler.until(lambda fake: fake.num_open == 0)
