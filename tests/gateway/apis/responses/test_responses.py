"""The Responses API over HTTP: items, the order of events, and how a response ends."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.clients.response_calls import (
    RESPONSES,
    TOOLS,
    events_of,
    official,
    respond,
    without_chance,
)
from support.clients.tool_chat import CALLS, FORMATS, script, tool_stack
from support.fakes.scheduler import failing, losing, replay
from support.processes.gateway_stack import Stack, StartStack
from surestep_common.errors import ModelFault
from surestep_gateway.text.tokenizer import Tokenizer
from surestep_proto.scheduler_pb2 import LENGTH

OUTPUT = "I think\nso.\n</think>\n\nLet me see.\n" + FORMATS["hermes"]
ASK: dict[str, Any] = {"tools": TOOLS}
LIFE = ["response.created", "response.in_progress"]


@pytest.fixture
async def stack(start_stack: StartStack, thinking_model: Path) -> Stack:
    """A gateway that parses reasoning and hermes calls."""
    return await tool_stack(start_stack, thinking_model, "hermes")


def kinds(events: list[dict[str, Any]]) -> list[str]:
    """Types of events, deltas in a row once."""
    found: list[str] = []
    for event in events:
        if not (event["type"].endswith(".delta") and found[-1:] == [event["type"]]):
            found.append(event["type"])
    return found


async def test_items_of_an_answer(stack: Stack, thinking: Tokenizer) -> None:
    ids = script(stack, thinking, OUTPUT)
    body = (await respond(stack, **ASK, metadata={"a": "b"}, instructions="Be brief.")).json()
    assert body["object"] == "response"
    assert body["id"].startswith("resp_")
    assert body["status"] == "completed"
    assert body["error"] is body["incomplete_details"] is None
    assert body["metadata"] == {"a": "b"}
    assert body["instructions"] == "Be brief."
    assert (body["temperature"], body["tool_choice"], body["truncation"]) == (
        1.0,
        "auto",
        "disabled",
    )
    thought, said, *calls = body["output"]
    assert thought["type"] == "reasoning"
    assert thought["content"] == [{"type": "reasoning_text", "text": "I think\nso."}]
    assert thought["summary"] == []
    assert said["type"] == "message"
    assert said["content"] == [
        {"type": "output_text", "text": "Let me see.", "annotations": [], "logprobs": []}
    ]
    assert [one["name"] for one in calls] == [name for name, _ in CALLS]
    assert {one["type"] for one in calls} == {"function_call"}
    assert {one["status"] for one in body["output"]} == {"completed"}
    assert len({one["id"] for one in body["output"]}) == 4
    assert body["usage"]["output_tokens"] == len(ids)
    assert body["usage"]["total_tokens"] == len(ids) + body["usage"]["input_tokens"]
    assert body["usage"]["output_tokens_details"]["reasoning_tokens"] > 0


async def test_the_order_of_events(stack: Stack, thinking: Tokenizer) -> None:
    script(stack, thinking, OUTPUT)
    events = await events_of(stack, **ASK)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    item = ["response.output_item.added", "response.content_part.added"]
    part = ["response.content_part.done", "response.output_item.done"]
    call = [
        "response.output_item.added",
        "response.function_call_arguments.delta",
        "response.function_call_arguments.done",
        "response.output_item.done",
    ]
    assert kinds(events) == [
        *LIFE,
        *item,
        "response.reasoning_text.delta",
        "response.reasoning_text.done",
        *part,
        *item,
        "response.output_text.delta",
        "response.output_text.done",
        *part,
        *call,
        *call,
        "response.completed",
    ]
    assert events[0]["response"]["status"] == "in_progress"
    assert events[0]["response"]["output"] == []
    final = events[-1]["response"]
    items = {event["output_index"]: event["item"] for event in events if "item" in event}
    assert list(items.values()) == final["output"]
    for event in events:
        if "item_id" in event:
            assert event["item_id"] == final["output"][event["output_index"]]["id"]


@pytest.mark.parametrize("chunk", [1, 3, 1000])
async def test_streamed_is_whole(stack: Stack, thinking: Tokenizer, chunk: int) -> None:
    script(stack, thinking, OUTPUT)
    whole = (await respond(stack, **ASK)).json()
    script(stack, thinking, OUTPUT, chunk=chunk)
    events = await events_of(stack, **ASK)
    assert without_chance(events[-1]["response"]) == without_chance(whole)
    texts: dict[int, str] = {}
    for event in events:
        if event["type"].endswith(".delta"):
            texts[event["output_index"]] = texts.get(event["output_index"], "") + event["delta"]
    told = [item.get("arguments") or item["content"][0]["text"] for item in whole["output"]]
    assert list(texts.values()) == told


async def test_cut_short_anywhere(stack: Stack, thinking: Tokenizer) -> None:
    """By length a response ends incomplete, and so does the item that it ends in."""
    ids = thinking.encode_now("a b</think>\n\nc " + FORMATS["hermes"], add_special_tokens=False)
    for end in range(1, len(ids), 7):
        stack.scheduler.script = replay(ids[:end], finish=LENGTH, chunk=3)
        whole = (await respond(stack, **ASK)).json()
        events = await events_of(stack, **ASK)
        assert events[-1]["type"] == "response.incomplete"
        final = events[-1]["response"]
        assert without_chance(final) == without_chance(whole)
        assert final["status"] == "incomplete"
        assert final["incomplete_details"] == {"reason": "max_output_tokens"}
        *before, last = final["output"]
        assert {item["status"] for item in before} <= {"completed"}
        assert last["status"] == "incomplete"


async def test_an_empty_answer_has_an_item(stack: Stack, thinking: Tokenizer) -> None:
    script(stack, thinking, "</think>")
    [item] = (await respond(stack)).json()["output"]
    assert item["content"][0]["text"] == ""
    assert kinds(await events_of(stack))[-1] == "response.completed"


async def test_failures_before_and_after_the_first_token(stack: Stack, thinking: Tokenizer) -> None:
    stack.scheduler.script = failing(ModelFault("no usable logits"))
    early = await stack.client.post(RESPONSES, json={"input": "x", "stream": True})
    assert early.status_code == 500
    assert early.json()["error"]["code"] == "server_error"
    ids = thinking.encode_now("so</think>one two", add_special_tokens=False)
    stack.scheduler.script = failing(ModelFault("no usable logits"), ids)
    late = await events_of(stack)
    assert late[-1]["type"] == "response.failed"
    failed = late[-1]["response"]
    assert failed["status"] == "failed"
    assert failed["error"] == {"code": "server_error", "message": "no usable logits"}
    assert failed["output"][0]["status"] == "completed"
    assert failed["output"][-1]["status"] == "incomplete"
    assert (await stack.client.get(f"{RESPONSES}/{failed['id']}")).json() == failed


async def test_a_scheduler_lost_at_any_token(stack: Stack, thinking: Tokenizer) -> None:
    ids = script(stack, thinking, OUTPUT)
    whole = (await respond(stack, **ASK)).json()
    for after in range(1, len(ids), 9):
        stack.scheduler.script = losing(ids, after)
        events = await events_of(stack, **ASK)
        assert without_chance(events[-1]["response"]) == without_chance(whole)
        assert [event["sequence_number"] for event in events] == list(range(len(events)))


async def test_the_official_client_streams(stack: Stack, thinking: Tokenizer) -> None:
    script(stack, thinking, OUTPUT, chunk=2)
    asked: Any = {"model": "thinking", "input": "hello", "tools": TOOLS}
    async with official(stack) as client:
        async with client.responses.stream(**asked) as stream:
            seen = [event.type async for event in stream]
            final = await stream.get_final_response()
        assert seen[:2] == LIFE
        assert final.output_text == "Let me see."
        calls = [item for item in final.output if item.type == "function_call"]
        assert [call.name for call in calls] == ["weather", "book"]
        [thought] = [item for item in final.output if item.type == "reasoning"]
        assert [part.text for part in thought.content or ()] == ["I think\nso."]
        again = await client.responses.retrieve(final.id)
        assert again.output_text == "Let me see."
        assert again.usage == final.usage


async def test_sampling_parameters_reach_the_scheduler(stack: Stack, thinking: Tokenizer) -> None:
    script(stack, thinking, "</think>x")
    asked = {"temperature": 0.5, "top_p": 0.9, "top_k": 7, "seed": 3, "max_output_tokens": 9}
    body = (await respond(stack, **asked)).json()
    request = stack.scheduler.requests[-1]
    assert round(request.sampling.temperature, 3) == 0.5
    assert request.sampling.top_k == 7
    assert request.max_tokens == 9
    assert (body["temperature"], body["top_p"], body["max_output_tokens"]) == (0.5, 0.9, 9)
