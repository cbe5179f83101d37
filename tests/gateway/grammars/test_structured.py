"""Structured outputs over HTTP: the grammar that each API's request brings to the scheduler."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel
from support.clients.response_calls import RESPONSES, official, respond
from support.clients.response_calls import TOOLS as FLAT_TOOLS
from support.clients.tool_chat import CITY, FORMATS, TOOLS, script, tool_stack
from support.processes.gateway_stack import Stack, StartStack
from surestep_gateway.text.tokenizer import Tokenizer
from surestep_proto.sampling_pb2 import Grammar


class Place(BaseModel):
    """Where it is."""

    city: str
    days: int


@pytest.fixture
async def stack(start_stack: StartStack, thinking_model: Path) -> Stack:
    """A gateway that parses reasoning and hermes calls."""
    return await tool_stack(start_stack, thinking_model, "hermes")


def grammar(stack: Stack) -> Grammar:
    """Of the latest request."""
    return stack.scheduler.requests[-1].sampling.grammar


async def test_all_apis_send_one_grammar(stack: Stack, thinking: Tokenizer) -> None:
    script(stack, thinking, 'so</think>{"city": "Oslo"}')
    named = {"name": "place", "schema": CITY}
    kind = {"type": "json_schema", "json_schema": named}
    assert (await stack.chat(response_format=kind)).status_code == 200
    sent = grammar(stack)
    assert list(sent.begins_after) == [thinking.id("</think>")]
    assert '"city"' in sent.source
    assert (await stack.chat(structured_outputs={"json": CITY})).status_code == 200
    assert grammar(stack) == sent
    text = {"format": {"type": "json_schema", **named}}
    assert (await respond(stack, text=text)).status_code == 200
    assert grammar(stack) == sent
    message: dict[str, Any] = {
        "messages": [{"role": "user", "content": "hello"}],
        "max_tokens": 9,
        "output_config": {"format": {"type": "json_schema", "schema": CITY}},
    }
    assert (await stack.client.post("/v1/messages", json=message)).status_code == 200
    assert grammar(stack) == sent
    assert (await stack.complete(guided_json=CITY)).status_code == 200
    assert not grammar(stack).begins_after
    await stack.chat()
    assert not stack.scheduler.requests[-1].sampling.HasField("grammar")


async def test_all_apis_force_calls(stack: Stack, thinking: Tokenizer) -> None:
    script(stack, thinking, "so</think>" + FORMATS["hermes"])
    await stack.chat(tools=TOOLS, tool_choice="required")
    sent = grammar(stack)
    await respond(stack, tools=FLAT_TOOLS, tool_choice="required")
    assert grammar(stack) == sent
    tools = [{"name": "weather", "input_schema": CITY}, {"name": "book", "input_schema": {}}]
    message = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 9, "tools": tools}
    forced = message | {"tool_choice": {"type": "any"}}
    assert (await stack.client.post("/v1/messages", json=forced)).status_code == 200
    assert "weather" in grammar(stack).source
    assert grammar(stack).begins_after == sent.begins_after
    one = {"type": "tool", "name": "book"}
    await stack.client.post("/v1/messages", json=message | {"tool_choice": one})
    assert "weather" not in grammar(stack).source
    await stack.chat(tools=TOOLS)
    assert not stack.scheduler.requests[-1].sampling.HasField("grammar")
    strict = [TOOLS[0] | {"function": TOOLS[0]["function"] | {"strict": True}}, TOOLS[1]]  # type: ignore[operator]
    await stack.chat(tools=strict)
    assert "TOLD" in grammar(stack).source
    await stack.chat(tools=strict, tool_choice="none")
    assert not stack.scheduler.requests[-1].sampling.HasField("grammar")


async def test_siblings_and_streams_have_it_too(stack: Stack, thinking: Tokenizer) -> None:
    script(stack, thinking, "so</think>yes")
    await stack.stream(
        "/v1/chat/completions",
        messages=[{"role": "user", "content": "x"}],
        n=3,
        structured_outputs={"choice": ["yes", "no"]},
    )
    sent = [request.sampling.grammar for request in stack.scheduler.requests]
    assert len(sent) == 3
    assert sent[0].source
    assert sent == sent[:1] * 3


async def test_large_schemas_are_prepared_apart(stack: Stack, thinking: Tokenizer) -> None:
    script(stack, thinking, "so</think>x")
    many = {f"property_{n}": {"type": "integer"} for n in range(2000)}
    kind = {"json": {"type": "object", "properties": many}}
    response = await stack.chat(structured_outputs=kind)
    assert response.status_code == 200, response.text
    assert "property_1999" in grammar(stack).source
    many["property_7"] = {"type": "nonesuch"}
    refused = await stack.chat(structured_outputs=kind)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "structured_outputs.json.properties.property_7"


async def test_the_servers_settings(
    start_stack: StartStack, thinking_model: Path, thinking: Tokenizer
) -> None:
    config = {"disable_any_whitespace": True, "enable_in_reasoning": True}
    stack = await start_stack(
        model=thinking_model, reasoning_parser="qwen3", structured_outputs_config=config
    )
    script(stack, thinking, "{}")
    await stack.chat(response_format={"type": "json_object"})
    assert '"whitespace_flexible": false' in grammar(stack).source
    assert not grammar(stack).begins_after


async def test_faults_are_named_in_each_api(stack: Stack) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "x"}}}
    text = {"format": {"type": "json_schema", "name": "n", "schema": schema}}
    refused = await stack.client.post(RESPONSES, json={"input": "x", "text": text})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "text.format.schema.properties.a"
    tools = [{"name": "f", "input_schema": schema}]
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 9, "tools": tools}
    forced = body | {"tool_choice": {"type": "any"}}
    message = await stack.client.post("/v1/messages", json=forced)
    assert message.status_code == 400
    assert "tools[0].input_schema.properties.a: " in message.json()["error"]["message"]
    flat = [{"type": "function", "name": "f", "parameters": schema, "strict": True}]
    strict = await stack.client.post(RESPONSES, json={"input": "x", "tools": flat})
    assert strict.json()["error"]["param"] == "tools[0].parameters.properties.a"
    assert stack.scheduler.requests == []


async def test_the_official_client_parses(stack: Stack, thinking: Tokenizer) -> None:
    script(stack, thinking, 'so</think>{"city": "Oslo", "days": 2}')
    async with official(stack) as client:
        whole = await client.responses.parse(model="thinking", input="x", text_format=Place)
        assert whole.output_parsed == Place(city="Oslo", days=2)
        async with client.responses.stream(
            model="thinking", input="x", text_format=Place
        ) as stream:
            final = await stream.get_final_response()
        assert final.output_parsed == Place(city="Oslo", days=2)
        chat = await client.chat.completions.parse(
            model="thinking", messages=[{"role": "user", "content": "x"}], response_format=Place
        )
        assert chat.choices[0].message.parsed == Place(city="Oslo", days=2)
