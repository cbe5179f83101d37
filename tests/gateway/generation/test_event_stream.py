"""Pings on streams that are silent: `--sse-keep-alive-interval`."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import anthropic
import openai
import pytest
from support.patience import PATIENCE_S
from support.processes.gateway_stack import Paused, Stack, StartStack, streaming
from surestep_common.errors import QueueFull
from surestep_gateway.settings.config import GatewaySettings
from surestep_proto.scheduler_pb2 import GenerateChunk, GenerateRequest

MESSAGES: Any = [{"role": "user", "content": "hello"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 4, "seed": 1},
    "/v1/completions": {"prompt": "hello", "max_tokens": 4, "seed": 1, "echo": True},
    "/v1/responses": {"input": "hello", "max_output_tokens": 4, "store": False},
    "/v1/messages": {"model": "tiny", "messages": MESSAGES, "max_tokens": 4},
    "/invocations": {"messages": MESSAGES, "max_tokens": 4, "seed": 1},
    "/inference/v1/generate": {
        "token_ids": [70, 71],
        "sampling_params": {"max_tokens": 4, "seed": 1},
    },
}
COMMENT = ": ping"
PINGS = dict.fromkeys(BODIES, COMMENT) | {"/v1/messages": 'event: ping\ndata: {"type":"ping"}'}
SHORT_S = 0.05
REFUSED = 'code="rate_limit_exceeded",end="error",path="{}",status="429",streamed="{}",type='


class Refusing(Paused):
    """A script that waits until `go` is set, then fails as a full queue does."""

    async def __call__(self, request: GenerateRequest) -> AsyncIterator[GenerateChunk]:
        async for chunk in super().__call__(request):
            if chunk.finish_reason:
                raise QueueFull("full")
            yield chunk


async def blocks(stack: Stack, path: str, script: Paused, pings: int) -> list[str]:
    """The blocks of a stream whose script goes on behind so many pings."""
    stack.scheduler.script = script
    text, body = "", BODIES[path] | {"stream": True}
    async with (
        asyncio.timeout(PATIENCE_S),
        stack.client.stream("POST", path, json=body) as response,
    ):
        assert response.status_code == 200
        async for piece in response.aiter_text():
            text += piece
            if text.count(PINGS[path]) >= pings:
                script.go.set()
    assert text.endswith("\n\n")
    return text[:-2].split("\n\n")


@contextlib.asynccontextmanager
async def _slow(stack: Stack, script: Paused | None = None) -> AsyncIterator[None]:
    """Requests wait for a few intervals before their first token."""
    stack.scheduler.script = script = script or Paused(0)
    async with asyncio.TaskGroup() as group:
        group.create_task(_go_on(script))
        yield


async def _go_on(script: Paused) -> None:
    await script.sent.wait()
    await asyncio.sleep(4 * SHORT_S)
    script.go.set()


async def test_every_api_that_streams_is_tried(stack: Stack) -> None:
    assert BODIES.keys() == set(await streaming(stack))


def test_pings_come_before_proxies_give_up() -> None:
    """nginx and load balancers do after a minute or less of silence."""
    assert 0 < GatewaySettings.model_fields["sse_keep_alive_interval"].default <= 20


@pytest.mark.parametrize("sent", [0, 1])
@pytest.mark.parametrize("path", BODIES)
@pytest.mark.rotates(1)
async def test_a_silent_stream_has_pings(start_stack: StartStack, path: str, sent: int) -> None:
    """Before the first token, with the status, and between two."""
    stack = await start_stack(sse_keep_alive_interval=SHORT_S)
    pinged = await blocks(stack, path, Paused(sent), pings=3)
    assert pinged.count(PINGS[path]) >= 3
    assert (pinged[0] == PINGS[path]) == (sent == 0)
    quiet = await blocks(stack, path, Paused(sent), pings=0)
    assert pinged[-1].partition("\n")[0] == quiet[-1].partition("\n")[0]  # complete


@pytest.mark.parametrize("path", BODIES)
async def test_an_error_behind_a_ping_is_an_error_of_the_stream(
    start_stack: StartStack, path: str
) -> None:
    """It is counted so, with its own status."""
    stack = await start_stack(sse_keep_alive_interval=SHORT_S)
    pinged = await blocks(stack, path, Refusing(0), pings=1)
    events = [block for block in pinged if block != PINGS[path]]
    assert "full" in events[-1]
    assert "error" in events[-1]
    metrics = (await stack.client.get("/metrics")).text
    assert REFUSED.format(path, "true") in metrics
    assert REFUSED.format(path, "false") not in metrics


@pytest.mark.parametrize("interval_s", [0, 30])
@pytest.mark.parametrize("path", BODIES)
@pytest.mark.rotates(1)
async def test_an_error_without_a_ping_has_its_status(
    start_stack: StartStack, path: str, interval_s: float
) -> None:
    stack = await start_stack(sse_keep_alive_interval=interval_s)
    stack.scheduler.script = script = Refusing(0)
    asking = asyncio.create_task(stack.client.post(path, json=BODIES[path] | {"stream": True}))
    await script.sent.wait()
    done, _ = await asyncio.wait([asking], timeout=5 * SHORT_S)
    assert not done
    script.go.set()
    assert (await asking).status_code == 429


async def test_the_official_clients_skip_pings(start_stack: StartStack) -> None:
    stack = await start_stack(sse_keep_alive_interval=SHORT_S)
    prompt = {"model": "tiny", "messages": MESSAGES, "max_tokens": 4}
    async with openai.AsyncOpenAI(base_url=f"{stack.url}/v1", api_key="none") as client:
        async with _slow(stack):
            stream = await client.chat.completions.create(stream=True, seed=1, **prompt)
            assert [chunk async for chunk in stream][-1].choices[0].finish_reason == "length"
        async with (
            _slow(stack),
            client.responses.stream(model="tiny", input="hello", max_output_tokens=16) as events,
        ):
            types = [event.type async for event in events]
            assert types[0] == "response.created"
    async with (
        _slow(stack),
        anthropic.AsyncAnthropic(base_url=stack.url, api_key="none") as messages_client,
        messages_client.messages.stream(**prompt) as message,
    ):
        assert (await message.get_final_message()).stop_reason == "max_tokens"


async def test_what_clients_see_of_an_error_behind_a_ping(start_stack: StartStack) -> None:
    """An exception while they read; they repeat nothing, for the status was 200."""
    stack = await start_stack(sse_keep_alive_interval=SHORT_S)
    prompt = {"model": "tiny", "messages": MESSAGES, "max_tokens": 4}
    async with openai.AsyncOpenAI(base_url=f"{stack.url}/v1", api_key="none") as client:
        async with _slow(stack, Refusing(0)):
            stream = await client.chat.completions.create(stream=True, **prompt)
            with pytest.raises(openai.APIError, match="full"):
                _ = [chunk async for chunk in stream]
        async with (
            _slow(stack, Refusing(0)),
            client.responses.stream(model="tiny", input="hello", max_output_tokens=16) as events,
        ):
            types = [event.type async for event in events]
            assert types == ["response.created", "response.in_progress", "response.failed"]
    async with (
        _slow(stack, Refusing(0)),
        anthropic.AsyncAnthropic(base_url=stack.url, api_key="none") as messages_client,
        messages_client.messages.stream(**prompt) as message,
    ):
        with pytest.raises(anthropic.APIStatusError, match="full"):
            await message.get_final_message()
    assert len(stack.scheduler.requests) == 3
