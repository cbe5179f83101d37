"""Reasoning and tool calls, over HTTP: whole and streamed alike, however the tokens arrive."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.checkpoints import tiny_tokenizer
from support.clients.tool_chat import (
    ASK,
    CALLS,
    CHAT,
    CITY,
    FORMATS,
    USER,
    calls_of,
    comparable,
    message_of,
    script,
    tool_stack,
)
from support.fakes.scheduler import losing, replay
from support.processes.gateway_stack import Stack, StartStack
from surestep_gateway.text.tokenizer import Tokenizer
from surestep_proto.scheduler_pb2 import LENGTH


@pytest.fixture
async def stack(start_stack: StartStack, thinking_model: Path) -> Stack:
    """A gateway that parses reasoning and hermes calls."""
    return await tool_stack(start_stack, thinking_model, "hermes")


@pytest.mark.parametrize("parser", FORMATS)
@pytest.mark.parametrize("markers", ["special", "spelled"])
@pytest.mark.rotates(1)
async def test_streamed_is_whole(
    start_stack: StartStack, thinking_model: Path, tmp_path: Path, parser: str, markers: str
) -> None:
    template = tiny_tokenizer.THINKING_TEMPLATE
    spelled = tiny_tokenizer.save(tmp_path / "spelled", template=template)
    model = thinking_model if markers == "special" else spelled
    stack = await tool_stack(start_stack, model, parser)
    tokenizer = Tokenizer.load(model)
    text = "I think\nso.\n</think>\n\nLet me see.\n" + FORMATS[parser]
    ids = script(stack, tokenizer, text)
    choice = (await stack.chat(**ASK)).json()["choices"][0]
    message = choice["message"]
    assert choice["finish_reason"] == "tool_calls"
    assert message["reasoning"] == message["reasoning_content"] == "I think\nso."
    assert message["content"] == "Let me see."
    assert calls_of(message) == CALLS
    assert len({call["id"] for call in message["tool_calls"]}) == 2
    for chunk in (1, 2, 3, 7, len(ids)):
        script(stack, tokenizer, text, chunk=chunk)
        events = await stack.stream(CHAT, **ASK)
        assert events.done
        assert comparable(message_of(events)) == comparable(message)
        reasons = [one["finish_reason"] for one in events.choices()]
        assert reasons == [None] * (len(reasons) - 1) + ["tool_calls"]


@pytest.mark.parametrize("end", ["", "\n</think>\n"])
async def test_calls_in_reasoning_that_the_output_ends_with(
    stack: Stack, thinking: Tokenizer, end: str
) -> None:
    text = "I ask.\n" + FORMATS["hermes"] + end
    ids = script(stack, thinking, text)
    choice = (await stack.chat(**ASK)).json()["choices"][0]
    message = choice["message"]
    assert (choice["finish_reason"], message["content"]) == ("tool_calls", None)
    assert (message["reasoning"], calls_of(message)) == ("I ask.", CALLS)
    for chunk in (1, 3, len(ids)):
        script(stack, thinking, text, chunk=chunk)
        events = await stack.stream(CHAT, **ASK)
        assert comparable(message_of(events)) == comparable(message)
    functions: list[dict[str, Any]] = [
        {"strict": True, "name": name, "parameters": CITY} for name in ("weather", "book")
    ]
    tools = [{"type": "function", "function": one} for one in functions]
    script(stack, thinking, text)  # which a strict function's grammar does not look at
    strict = (await stack.chat(**ASK | {"tools": tools})).json()["choices"][0]["message"]
    assert strict["reasoning"] == text.removesuffix(end)
    assert not strict.get("tool_calls")


async def test_the_wire_format_of_a_streamed_call(stack: Stack, thinking: Tokenizer) -> None:
    script(stack, thinking, "</think>" + FORMATS["hermes"])
    deltas = [choice["delta"] for choice in (await stack.stream(CHAT, **ASK)).choices()]
    parts = [part for delta in deltas for part in delta.get("tool_calls", ())]
    first = parts[0]
    assert first.keys() == {"index", "id", "type", "function"}
    assert (first["index"], first["type"]) == (0, "function")
    assert first["function"]["name"] == "weather"
    assert parts[1].keys() == {"index", "function"}
    assert parts[1]["function"].keys() == {"arguments"}
    assert len(parts) > 10, "arguments come while they are written"
    assert not any("content" in delta for delta in deltas[1:])


async def test_only_calls_leave_the_content_null(stack: Stack, thinking: Tokenizer) -> None:
    script(stack, thinking, "</think>\n\n" + FORMATS["hermes"])
    message = (await stack.chat(**ASK)).json()["choices"][0]["message"]
    assert message["content"] is None
    assert message["reasoning"] is None


async def test_no_call_is_an_ordinary_answer(stack: Stack, thinking: Tokenizer) -> None:
    script(stack, thinking, "why\n</think>\n\nNo.")
    choice = (await stack.chat(**ASK)).json()["choices"][0]
    assert choice["finish_reason"] == "stop"
    assert "tool_calls" not in choice["message"]
    assert choice["message"]["content"] == "No."


@pytest.mark.parametrize("parser", FORMATS)
@pytest.mark.rotates(3)
async def test_cut_short_anywhere(
    start_stack: StartStack, thinking_model: Path, thinking: Tokenizer, parser: str
) -> None:
    stack = await tool_stack(start_stack, thinking_model, parser)
    ids = thinking.encode_now("a b</think>\n\nc " + FORMATS[parser], add_special_tokens=False)
    for end in range(1, len(ids), 5):
        stack.scheduler.script = replay(ids[:end], finish=LENGTH, chunk=3)
        choice = (await stack.chat(**ASK)).json()["choices"][0]
        events = await stack.stream(CHAT, **ASK)
        assert choice["finish_reason"] == events.choices()[-1]["finish_reason"] == "length"
        assert comparable(message_of(events)) == comparable(choice["message"])
        assert comparable(choice["message"]).keys() >= {"reasoning"}


async def test_usage_counts_reasoning(stack: Stack, thinking: Tokenizer) -> None:
    thought = thinking.encode_now("let me think\n", add_special_tokens=False)
    ids = script(stack, thinking, "let me think\n</think>\n\nyes", chunk=4)
    usage = (await stack.chat(n=2)).json()["usage"]
    assert usage["completion_tokens"] == 2 * len(ids)
    assert usage["completion_tokens_details"] == {"reasoning_tokens": 2 * len(thought)}
    options = {"include_usage": True}
    events = await stack.stream(CHAT, messages=USER, n=2, stream_options=options)
    assert events[-1]["usage"] == usage


async def test_thinking_switched_off(stack: Stack, thinking: Tokenizer) -> None:
    script(stack, thinking, "yes <think> maybe")
    body = (await stack.chat(chat_template_kwargs={"enable_thinking": False})).json()
    assert body["choices"][0]["message"]["content"] == "yes <think> maybe"
    assert body["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0}


async def test_reasoning_can_be_left_out(stack: Stack, thinking: Tokenizer) -> None:
    script(stack, thinking, "secret</think>yes")
    choice = (await stack.chat(include_reasoning=False)).json()["choices"][0]
    assert choice["message"]["reasoning"] is None
    assert choice["message"]["content"] == "yes"
    events = await stack.stream(CHAT, messages=USER, include_reasoning=False)
    assert message_of(events) == {"role": "assistant", "content": "yes"}


async def test_siblings_have_calls_of_their_own(stack: Stack, thinking: Tokenizer) -> None:
    script(stack, thinking, "a</think>" + FORMATS["hermes"], chunk=2)
    whole = (await stack.chat(**ASK, n=3)).json()["choices"]
    events = await stack.stream(CHAT, **ASK, n=3)
    ids = set()
    for choice in whole:
        assert calls_of(choice["message"]) == CALLS
        ids |= {call["id"] for call in choice["message"]["tool_calls"]}
        assert comparable(message_of(events, choice["index"])) == comparable(choice["message"])
    assert len(ids) == 6


async def test_one_call_at_most(stack: Stack, thinking: Tokenizer) -> None:
    script(stack, thinking, "</think>" + FORMATS["hermes"])
    one = (await stack.chat(**ASK, parallel_tool_calls=False)).json()["choices"][0]
    assert calls_of(one["message"]) == CALLS[:1]
    events = await stack.stream(CHAT, **ASK, parallel_tool_calls=False)
    assert comparable(message_of(events)) == comparable(one["message"])
    two = (await stack.chat(**ASK, parallel_tool_calls=True)).json()["choices"][0]
    assert calls_of(two["message"]) == CALLS


async def test_stop_strings_end_reasoning_and_calls(stack: Stack, thinking: Tokenizer) -> None:
    script(stack, thinking, "one two three</think>\n\n" + FORMATS["hermes"], chunk=3)
    choice = (await stack.chat(**ASK, stop="two")).json()["choices"][0]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "two")
    assert choice["message"]["reasoning"] == "one "
    choice = (await stack.chat(**ASK, stop="</tool_call>")).json()["choices"][0]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("tool_calls", "</tool_call>")
    assert calls_of(choice["message"]) == CALLS[:1]


async def test_logprobs_and_ids_cover_every_token(stack: Stack, thinking: Tokenizer) -> None:
    ids = script(stack, thinking, "a</think>" + FORMATS["hermes"], chunk=4)
    asked: dict[str, Any] = ASK | {"logprobs": True, "return_token_ids": True}
    choice = (await stack.chat(**asked)).json()["choices"][0]
    assert choice["token_ids"] == ids
    assert len(choice["logprobs"]["content"]) == len(ids)
    choices = (await stack.stream(CHAT, **asked)).choices()
    assert [i for one in choices for i in one.get("token_ids", ())] == ids
    objects = [one["logprobs"] for one in choices if one["logprobs"]]
    entries = [entry for one in objects for entry in one["content"]]
    assert entries == choice["logprobs"]["content"]


async def test_a_scheduler_lost_at_any_token(stack: Stack, thinking: Tokenizer) -> None:
    """The parser goes on where it stood: nothing is told twice and nothing is left out."""
    ids = script(stack, thinking, "a b</think>\n\n" + FORMATS["hermes"])
    whole = (await stack.chat(**ASK)).json()["choices"][0]["message"]

    for after in range(1, len(ids), 4):
        stack.scheduler.script = losing(ids, after)
        events = await stack.stream(CHAT, **ASK)
        assert events.done
        assert comparable(message_of(events)) == comparable(whole)
