"""Anthropic's Messages API over HTTP, and with its official client."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anthropic
import httpx
import pytest
from support.clients.response_calls import parsed
from support.clients.tool_chat import CALLS, CITY, FORMATS, script, tool_stack
from support.fakes.scheduler import failing, losing, replay
from support.processes.gateway_stack import Stack, StartStack
from surestep_common.errors import ModelFault, QueueFull
from surestep_gateway.text.tokenizer import Tokenizer
from surestep_proto.scheduler_pb2 import LENGTH

MESSAGES = "/v1/messages"
USER: Any = [{"role": "user", "content": "hello"}]
TOOLS: Any = [
    {"name": "weather", "input_schema": CITY},
    {"name": "book", "input_schema": {"type": "object"}},
]
OUTPUT = "I think\nso.\n</think>\n\nLet me see.\n" + FORMATS["hermes"]


@pytest.fixture
async def stack(start_stack: StartStack, thinking_model: Path) -> Stack:
    """A gateway that parses reasoning and hermes calls."""
    return await tool_stack(start_stack, thinking_model, "hermes")


@asynccontextmanager
async def official(stack: Stack, key: str = "none") -> AsyncIterator[anthropic.AsyncAnthropic]:
    """The official client of a stack."""
    async with anthropic.AsyncAnthropic(
        base_url=stack.url, api_key=key, max_retries=0, timeout=30
    ) as client:
        yield client


async def ask(stack: Stack, **body: Any) -> httpx.Response:
    """A message."""
    body = {"messages": USER, "max_tokens": 200} | body
    return await stack.client.post(MESSAGES, json=body)


def prompt(stack: Stack, tokenizer: Tokenizer) -> str:
    """The latest prompt, as the model read it."""
    ids = stack.scheduler.requests[-1].prompt_ids
    return tokenizer.decode(ids, skip_special_tokens=False)


async def test_blocks_of_an_answer(stack: Stack, thinking: Tokenizer) -> None:
    ids = script(stack, thinking, OUTPUT)
    body = (await ask(stack, tools=TOOLS)).json()
    assert (body["type"], body["role"]) == ("message", "assistant")
    assert body["id"].startswith("msg_")
    thought, said, *calls = body["content"]
    assert (thought["type"], thought["thinking"]) == ("thinking", "I think\nso.")
    assert said == {"type": "text", "text": "Let me see."}
    assert [(one["name"], one["input"]) for one in calls] == CALLS
    assert len({one["id"] for one in calls}) == 2
    assert (body["stop_reason"], body["stop_sequence"]) == ("tool_use", None)
    assert body["usage"]["output_tokens"] == len(ids)
    assert body["usage"]["input_tokens"] == len(stack.scheduler.requests[-1].prompt_ids)


@pytest.mark.parametrize("chunk", [1, 4, 1000])
async def test_the_official_client(stack: Stack, thinking: Tokenizer, chunk: int) -> None:
    script(stack, thinking, OUTPUT, chunk=chunk)
    asked: Any = {"model": "thinking", "max_tokens": 200, "messages": USER, "tools": TOOLS}
    async with official(stack) as client:
        whole = await client.messages.create(**asked)
        async with client.messages.stream(**asked) as stream:
            texts = [text async for text in stream.text_stream]
            final = await stream.get_final_message()
    assert "".join(texts) == "Let me see."
    for message in (whole, final):
        assert message.stop_reason == "tool_use"
        blocks: list[Any] = list(message.content)
        thought, said, *calls = blocks
        assert thought.type == "thinking"
        assert thought.thinking == "I think\nso."
        assert thought.signature
        assert said.type == "text"
        assert said.text == "Let me see."
        assert [(one.name, one.input) for one in calls if one.type == "tool_use"] == CALLS
    assert whole.usage == final.usage


async def test_the_order_of_events(stack: Stack, thinking: Tokenizer) -> None:
    script(stack, thinking, "so</think>yes")
    response = await ask(stack, stream=True)
    kinds: list[str] = []
    for event in parsed(response.text):
        if kinds[-1:] != [event["type"]]:
            kinds.append(event["type"])
    block = ["content_block_start", "content_block_delta", "content_block_stop"]
    assert kinds == ["message_start", *block, *block, "message_delta", "message_stop"]


async def test_a_conversation_with_tools(stack: Stack, thinking: Tokenizer) -> None:
    script(stack, thinking, "so</think>" + FORMATS["hermes"])
    async with official(stack) as client:
        asked: Any = {"model": "thinking", "max_tokens": 100, "tools": TOOLS, "system": "Be brief."}
        first = await client.messages.create(**asked, messages=USER)
        calls = [block for block in first.content if block.type == "tool_use"]
        results = [
            {"type": "tool_result", "tool_use_id": one.id, "content": f"{n} degrees"}
            for n, one in enumerate(calls)
        ]
        script(stack, thinking, "well</think>Fine.")
        more: list[Any] = [{"role": "assistant", "content": first.content}]
        more.append({"role": "user", "content": [*results, {"type": "text", "text": "And?"}]})
        final = await client.messages.create(**asked, messages=[*USER, *more])
    assert final.stop_reason == "end_turn"
    read = prompt(stack, thinking)
    assert "<|im_start|>system\nBe brief.<|im_end|>" in read
    assert "<think>so</think>" in read
    assert "[weather city=" in read
    assert "<|im_start|>tool\n0 degrees<|im_end|>\n<|im_start|>tool\n1 degrees<|im_end|>" in read
    assert "<|im_start|>user\nAnd?<|im_end|>" in read


async def test_how_a_message_ends(stack: Stack, thinking: Tokenizer) -> None:
    ids = script(stack, thinking, "</think>one two three")
    stopped = (await ask(stack, stop_sequences=["two"])).json()
    assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", "two")
    assert stopped["content"] == [{"type": "text", "text": "one "}]
    stack.scheduler.script = replay(ids[:-2], finish=LENGTH)
    cut = (await ask(stack)).json()
    assert cut["stop_reason"] == "max_tokens"
    script(stack, thinking, '</think><tool_call>\n{"name": "book", "arguments": {"a"')
    broken = (await ask(stack, tools=TOOLS)).json()
    assert broken["content"][-1]["input"] == {"INVALID_JSON": '{"a"'}


async def test_thinking_may_be_switched(stack: Stack, thinking: Tokenizer) -> None:
    script(stack, thinking, "yes")
    off = (await ask(stack, thinking={"type": "disabled"})).json()
    assert off["content"] == [{"type": "text", "text": "yes"}]
    assert prompt(stack, thinking).endswith("</think>\n\n")
    await ask(stack, thinking={"type": "enabled", "budget_tokens": 1024})
    assert prompt(stack, thinking).endswith("<think>\n")


async def test_tokens_are_counted(stack: Stack, thinking: Tokenizer) -> None:
    script(stack, thinking, "</think>x")
    async with official(stack) as client:
        asked: Any = {"model": "thinking", "messages": USER, "system": "Be brief.", "tools": TOOLS}
        count = await client.messages.count_tokens(**asked)
        message = await client.messages.create(**asked, max_tokens=5)
    assert count.input_tokens == message.usage.input_tokens


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": None}, "max_tokens"),
    ({"messages": []}, "messages"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
        "messages[0].content[0]",
    ),
    (
        {
            "messages": [
                {
                    "role": "user",
                    "content": [{"type": "tool_use", "id": "a", "name": "b", "input": {}}],
                }
            ]
        },
        "messages[0].content[0]",
    ),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0]"),
    ({"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
    ({"container": "x"}, "container"),
    ({"tool_choice": {"type": "any"}}, "tool_choice"),
    ({"temperature": 3}, "temperature"),
]


@pytest.mark.parametrize(("body", "named"), REFUSED, ids=[str(body)[:40] for body, _ in REFUSED])
async def test_what_is_refused_is_named(stack: Stack, body: dict[str, Any], named: str) -> None:
    response = await ask(stack, **body)
    assert response.status_code == 400, response.text
    error = response.json()
    assert error["type"] == "error"
    assert error["error"]["type"] == "invalid_request_error"
    assert named in error["error"]["message"]
    assert stack.scheduler.requests == []


async def test_errors_in_the_clients_own_exceptions(
    start_stack: StartStack, thinking_model: Path, thinking: Tokenizer
) -> None:
    stack = await start_stack(model=thinking_model, reasoning_parser="qwen3", api_key=["right"])
    asked: Any = {"model": "thinking", "max_tokens": 5, "messages": USER}
    async with official(stack, "wrong") as client:
        with pytest.raises(anthropic.AuthenticationError) as refusal:
            await client.messages.create(**asked)
        assert refusal.value.response.json()["error"]["type"] == "authentication_error"
    async with official(stack, "right") as client:  # as x-api-key
        script(stack, thinking, "</think>yes")
        assert (await client.messages.create(**asked)).content[-1].type == "text"
        with pytest.raises(anthropic.NotFoundError):
            await client.messages.create(**asked | {"model": "nonesuch"})
        stack.scheduler.script = failing(QueueFull("too many", retry_after=1))
        with pytest.raises(anthropic.RateLimitError):
            await client.messages.create(**asked)
        ids = thinking.encode_now("</think>one", add_special_tokens=False)
        stack.scheduler.script = failing(ModelFault("no usable logits"), ids)
        with pytest.raises(anthropic.APIStatusError, match="no usable logits"):
            async with client.messages.stream(**asked) as stream:
                await stream.get_final_message()
    unknown = await stack.client.post("/v1/messages/nonesuch", headers={"x-api-key": "right"})
    assert unknown.status_code == 404
    assert unknown.json()["type"] == "error"


async def test_a_scheduler_lost_at_any_token(stack: Stack, thinking: Tokenizer) -> None:
    ids = script(stack, thinking, OUTPUT)
    whole = (await ask(stack, tools=TOOLS)).json()["content"]
    for after in range(1, len(ids), 13):
        stack.scheduler.script = losing(ids, after)
        events = parsed((await ask(stack, tools=TOOLS, stream=True)).text)
        texts: dict[int, str] = {}
        for event in events:
            if event["type"] == "content_block_delta" and "signature" not in event["delta"]:
                _, text = event["delta"].values()
                texts[event["index"]] = texts.get(event["index"], "") + text
        assert texts[0] == whole[0]["thinking"]
        assert texts[1] == whole[1]["text"]
        assert [json.loads(texts[n]) for n in (2, 3)] == [one["input"] for one in whole[2:]]
