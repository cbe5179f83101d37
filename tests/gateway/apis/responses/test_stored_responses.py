"""Stored responses: going on from them, looking at them, cancelling and forgetting them."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from support.clients.response_calls import RESPONSES, TOOLS, events_of, official, parsed, respond
from support.clients.tool_chat import FORMATS, script, tool_stack
from support.processes.gateway_stack import Paused, Stack, StartStack
from support.processes.redis_server import redis_server
from surestep_gateway.text.tokenizer import Tokenizer

FLAGS: dict[str, Any] = {
    "reasoning_parser": "qwen3",
    "tool_call_parser": "hermes",
    "enable_auto_tool_choice": True,
}


@pytest.fixture
def redis_url(tmp_path: Path) -> Iterator[str]:
    """A Redis server on loopback."""
    with redis_server(tmp_path) as (url, _):
        yield url


@pytest.fixture(params=["memory", "redis"])
async def stack(
    request: pytest.FixtureRequest, start_stack: StartStack, thinking_model: Path
) -> Stack:
    """A gateway that stores responses in memory or in Redis."""
    where = "memory" if request.param == "memory" else request.getfixturevalue("redis_url")
    return await start_stack(model=thinking_model, responses_store=where, **FLAGS)


@pytest.fixture
async def in_memory(start_stack: StartStack, thinking_model: Path) -> Stack:
    return await tool_stack(start_stack, thinking_model, "hermes")


def prompt(stack: Stack, tokenizer: Tokenizer) -> str:
    """The latest prompt, as the model read it."""
    ids = stack.scheduler.requests[-1].prompt_ids
    return tokenizer.decode(ids, skip_special_tokens=False)


async def test_a_conversation_goes_on(stack: Stack, thinking: Tokenizer) -> None:
    """With the official client: a call, its result, and another question, each by one id."""
    async with official(stack) as client:
        asked: Any = {"model": "thinking", "tools": TOOLS, "instructions": "Be brief."}
        script(stack, thinking, "so\n</think>\n" + FORMATS["hermes"])
        first = await client.responses.create(**asked, input="weather?")
        calls = [item for item in first.output if item.type == "function_call"]
        results: Any = [
            {"type": "function_call_output", "call_id": one.call_id, "output": f"{n} degrees"}
            for n, one in enumerate(calls)
        ]
        script(stack, thinking, "well</think>Fine.")
        second = await client.responses.create(
            **asked, input=results, previous_response_id=first.id
        )
        assert second.output_text == "Fine."
        assert second.previous_response_id == first.id
        read = prompt(stack, thinking)
        assert read.count("Be brief.") == 1
        assert "weather?" in read
        assert "<think>so</think>" in read
        assert "[weather city=" in read
        assert "0 degrees" in read
        third = await client.responses.create(
            model="thinking", input="And?", previous_response_id=second.id
        )
        read = prompt(stack, thinking)
        assert "Be brief." not in read
        assert read.index("weather?") < read.index("0 degrees") < read.index("Fine.")
        assert read.index("Fine.") < read.index("And?")
        items = [item async for item in client.responses.input_items.list(third.id, order="asc")]
        assert [item.type for item in items] == [
            *("message", "reasoning", "function_call", "function_call"),
            *("function_call_output", "function_call_output", "reasoning", "message", "message"),
        ]
        page = await client.responses.input_items.list(third.id, limit=4)
        assert [item.id for item in page.data] == [item.id for item in items[:-5:-1]]
        assert page.has_more
        rest = [item.id async for item in page]
        assert rest == [item.id for item in reversed(items)]


async def test_integers_of_any_size(stack: Stack, thinking: Tokenizer) -> None:
    """In tools and in fields of items that nothing reads: shown, streamed and stored as they came."""
    large = 2**80
    sizes = {"type": "object", "properties": {"size": {"type": "integer", "maximum": large}}}
    tools = [{"type": "function", "name": "weigh", "parameters": sizes}]
    thought = {"type": "reasoning", "summary": [{"type": "summary_text", "seen": large}]}
    asked: Any = {"tools": tools, "input": [thought, {"role": "user", "content": "hello"}]}
    script(stack, thinking, "so\n</think>\nFine.")
    whole = (await respond(stack, **asked)).json()
    assert whole["tools"][0]["parameters"] == sizes
    stored = (await stack.client.get(f"{RESPONSES}/{whole['id']}/input_items?order=asc")).json()
    assert stored["data"][0]["summary"] == thought["summary"]
    script(stack, thinking, "so\n</think>\nFine.")
    events = await events_of(stack, previous_response_id=whole["id"], tools=tools)
    assert events[-1]["response"]["tools"][0]["parameters"] == sizes
    second = events[-1]["response"]["id"]
    stored = (await stack.client.get(f"{RESPONSES}/{second}/input_items?order=asc")).json()
    assert stored["data"][0]["summary"] == thought["summary"]


async def test_items_may_be_referred_to(stack: Stack, thinking: Tokenizer) -> None:
    script(stack, thinking, "so</think>Forty-two.")
    first = (await respond(stack, input="how many?")).json()
    said = first["output"][-1]["id"]
    asked = [
        {"role": "user", "content": "how many?"},
        {"type": "item_reference", "id": said},
        {"role": "user", "content": "sure?"},
    ]
    assert (await respond(stack, input=asked)).status_code == 200
    read = prompt(stack, thinking)
    assert read.index("Forty-two.") < read.index("sure?")
    for unknown in (said[:-1] + "f", "msg_abc", f"msg_{'0' * 36}"):
        response = await respond(stack, input=[{"type": "item_reference", "id": unknown}])
        assert response.status_code == 404, response.text


async def test_responses_are_forgotten(stack: Stack, thinking: Tokenizer) -> None:
    script(stack, thinking, "</think>x")
    async with official(stack) as client:
        first = await client.responses.create(model="thinking", input="a")
        second = await client.responses.create(
            model="thinking", input="b", previous_response_id=first.id
        )
        await client.responses.delete(first.id)
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(first.id)
        with pytest.raises(openai.NotFoundError):
            await client.responses.delete(first.id)
        with pytest.raises(openai.BadRequestError) as refusal:
            await client.responses.create(
                model="thinking", input="c", previous_response_id=first.id
            )
        assert refusal.value.code == "previous_response_not_found"
        assert refusal.value.param == "previous_response_id"
        assert (await client.responses.retrieve(second.id)).id == second.id
        unstored = await client.responses.create(model="thinking", input="a", store=False)
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(unstored.id)


async def test_another_key_finds_nothing(
    start_stack: StartStack, thinking_model: Path, thinking: Tokenizer
) -> None:
    stack = await start_stack(model=thinking_model, api_key=["one", "two"], **FLAGS)
    script(stack, thinking, "</think>x")
    async with official(stack, "one") as mine, official(stack, "two") as other:
        response = await mine.responses.create(model="thinking", input="secret")
        assert await mine.responses.retrieve(response.id)
        for attempt in (
            other.responses.retrieve(response.id),
            other.responses.delete(response.id),
            other.responses.cancel(response.id),
        ):
            with pytest.raises(openai.NotFoundError):
                await attempt
        with pytest.raises(openai.BadRequestError, match="is stored"):
            await other.responses.create(
                model="thinking", input="x", previous_response_id=response.id
            )
        with pytest.raises(openai.NotFoundError):
            await other.responses.input_items.list(response.id)


@pytest.mark.parametrize("stream", [True, False])
async def test_a_response_is_cancelled(in_memory: Stack, thinking: Tokenizer, stream: bool) -> None:
    stack, paused = in_memory, Paused(5)
    stack.scheduler.script = paused
    body = {"input": "hello", "stream": stream}
    asking = asyncio.create_task(stack.client.post(RESPONSES, json=body))
    await asyncio.wait_for(paused.sent.wait(), 10)
    path = f"{RESPONSES}/{stack.scheduler.requests[-1].request_id.split('-')[0]}"
    assert (await stack.client.get(path)).json()["status"] == "in_progress"
    assert (await stack.client.delete(path)).status_code == 400
    cancelled = (await stack.client.post(f"{path}/cancel")).json()
    assert cancelled["status"] == "cancelled"
    answer = await asyncio.wait_for(asking, 10)
    assert answer.status_code == 200
    if stream:
        last = parsed(answer.text)[-1]
        assert last["type"] == "response.incomplete"
        final = last["response"]
    else:
        final = answer.json()
    assert final["status"] == "cancelled"
    assert (await stack.client.get(path)).json() == final
    await stack.scheduler.until(lambda scheduler: scheduler.num_open == 0)
    again = await stack.client.post(f"{path}/cancel")
    assert again.status_code == 400
    assert "nothing to cancel" in again.json()["error"]["message"]


@pytest.fixture(params=["gone", "silent"])
def lost_url(request: pytest.FixtureRequest) -> Iterator[str]:
    """A port that nobody listens on, or where connections are taken and nothing is said."""
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        if request.param == "silent":
            silent.listen()
        yield f"redis://127.0.0.1:{silent.getsockname()[1]}/0"


@pytest.mark.timeout(60)
@pytest.mark.rotates(1)
async def test_a_store_that_does_not_answer_costs_no_answer(
    start_stack: StartStack, thinking_model: Path, thinking: Tokenizer, lost_url: str
) -> None:
    stack = await start_stack(model=thinking_model, responses_store=lost_url, **FLAGS)
    script(stack, thinking, "</think>yes")
    whole = (await respond(stack)).json()
    assert whole["output"][-1]["content"][0]["text"] == "yes"
    assert whole["store"] is False
    assert (await events_of(stack))[-1]["response"]["store"] is False
    lookup = await stack.client.get(f"{RESPONSES}/{whole['id']}")
    assert lookup.status_code == 503
    follow = await respond(stack, previous_response_id=whole["id"])
    assert follow.status_code == 503


async def test_nothing_is_stored_where_there_is_no_store(
    start_stack: StartStack, thinking_model: Path, thinking: Tokenizer
) -> None:
    stack = await start_stack(model=thinking_model, responses_store="none", **FLAGS)
    script(stack, thinking, "</think>yes")
    whole = (await respond(stack, store=True)).json()
    assert whole["store"] is False
    assert (await stack.client.get(f"{RESPONSES}/{whole['id']}")).status_code == 404
