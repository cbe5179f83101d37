"""Answers whose grammar is wider than the schema: checked when they are over, and violations told."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest
from support.clients.tool_chat import script, tool_stack
from support.fakes.scheduler import replay
from support.processes.gateway_stack import Events, Stack, StartStack
from surestep_gateway.text.tokenizer import Tokenizer
from surestep_proto.scheduler_pb2 import LENGTH

SET = {"type": "array", "items": {"type": "string"}, "uniqueItems": True}
TAGS = {"type": "object", "properties": {"tags": SET}, "required": ["tags"]}
BAD, GOOD = '{"tags": ["a", "a"]}', '{"tags": ["a", "b"]}'
TOLD = [{"tool_call": None, "path": "$.tags", "message": "['a', 'a'] has non-unique elements"}]
USER = [{"role": "user", "content": "x"}]
BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", {"messages": USER}),
    "completions": ("/v1/completions", {"prompt": "x"}),
    "responses": ("/v1/responses", {"input": "x"}),
    "messages": ("/v1/messages", {"messages": USER, "max_tokens": 99}),
}


@pytest.fixture
async def stack(start_stack: StartStack, thinking_model: Path) -> Stack:
    return await tool_stack(start_stack, thinking_model, "hermes")


async def whole(stack: Stack, api: str, **fields: Any) -> dict[str, Any]:
    """Return an answer, no stream, as it tells its end."""
    path, body = BODIES[api]
    response = await stack.client.post(path, json=body | fields)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    shown: dict[str, Any] = answer["choices"][0] if "choices" in answer else answer
    return shown


async def streamed(stack: Stack, api: str, **fields: Any) -> dict[str, Any]:
    """The last event of a stream that says something of its end."""
    path, body = BODIES[api]
    response = await stack.client.post(path, json=body | fields | {"stream": True})
    assert response.status_code == 200, response.text
    data = [line[6:] for line in response.text.splitlines() if line.startswith("data: {")]
    events = Events.parse("".join(f"data: {one}\n\n" for one in data))
    shown = {"responses": events[-1].get("response"), "messages": events[-2]}.get(api)
    shown = events.choices()[-1] if shown is None else shown
    others = [one for one in events if "schema_violations" in str(one)]
    assert len(others) == ("schema_violations" in shown)
    return shown


@pytest.mark.parametrize("api", BODIES)
@pytest.mark.parametrize("ask", [whole, streamed])
@pytest.mark.rotates(1)
async def test_violations_are_told(stack: Stack, thinking: Tokenizer, api: str, ask: Any) -> None:
    lead = "" if api == "completions" else "so</think>"
    script(stack, thinking, lead + BAD)
    shown = await ask(stack, api, structured_outputs={"json": TAGS})
    assert shown["schema_violations"] == TOLD
    assert shown.get("finish_reason", "stop") == "stop"
    script(stack, thinking, lead + GOOD)
    assert (await ask(stack, api, structured_outputs={"json": TAGS}))["schema_violations"] == []
    exact = {"type": "object", "properties": {"tags": {"type": "array"}}}
    shown = await ask(stack, api, structured_outputs={"json": exact})
    assert "schema_violations" not in shown
    ids = thinking.encode_now(lead + BAD, add_special_tokens=False)
    stack.scheduler.script = replay(ids[:-2], finish=LENGTH)  # not even JSON
    shown = await ask(stack, api, structured_outputs={"json": TAGS})
    assert "schema_violations" not in shown


async def test_each_choice_has_its_own(stack: Stack, thinking: Tokenizer) -> None:
    script(stack, thinking, "so</think>" + BAD)
    response = await stack.chat(n=3, structured_outputs={"json": TAGS})
    assert [one["schema_violations"] for one in response.json()["choices"]] == [TOLD] * 3


async def test_arguments_of_calls(stack: Stack, thinking: Tokenizer) -> None:
    call = '<tool_call>\n{"name": "%s", "arguments": %s}\n</tool_call>'
    odd = {"type": "function", "function": {"name": "odd", "parameters": TAGS}}
    plain = {"type": "function", "function": {"name": "plain", "parameters": {"type": "object"}}}
    text = "\n".join([call % ("plain", "{}"), call % ("odd", BAD), call % ("odd", GOOD)])
    script(stack, thinking, f"so</think>{text}")
    response = await stack.chat(tools=[odd, plain], tool_choice="required")
    (choice,) = response.json()["choices"]
    assert [one["function"]["name"] for one in choice["message"]["tool_calls"]] == [
        "plain",
        "odd",
        "odd",
    ]
    assert choice["schema_violations"] == [TOLD[0] | {"tool_call": 1}]
    tools = [{"name": "odd", "input_schema": TAGS, "strict": True}]
    assert (await whole(stack, "messages", tools=tools))["schema_violations"][0]["tool_call"] == 1
    auto = await stack.chat(tools=[odd, plain])
    assert "schema_violations" not in auto.json()["choices"][0]


async def test_content_is_not_missed_where_there_are_calls(
    stack: Stack, thinking: Tokenizer
) -> None:
    script(stack, thinking, 'so</think><tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>')
    tools = [{"type": "function", "function": {"name": "f"}}]
    response = await stack.chat(tools=tools, structured_outputs={"json": TAGS})
    assert response.json()["choices"][0]["schema_violations"] == []


async def test_few_violations_of_many_calls_are_told(stack: Stack, thinking: Tokenizer) -> None:
    """And a large schema is sent to its check once, not once for each call."""
    large = TAGS | {"description": "x" * 200_000}
    odd = {"type": "function", "function": {"name": "odd", "parameters": large}}
    call = f'<tool_call>\n{{"name": "odd", "arguments": {BAD}}}\n</tool_call>'
    script(stack, thinking, "so</think>" + "\n".join([call] * 100), chunk=100)
    response = await stack.chat(tools=[odd], tool_choice="required")
    (choice,) = response.json()["choices"]
    assert len(choice["message"]["tool_calls"]) == 100
    assert choice["schema_violations"] == [TOLD[0] | {"tool_call": n} for n in range(8)]


COSTLY = {"type": "string", "pattern": r"^(?=(a+)+$)a*$"}


async def test_a_check_that_takes_too_long_is_told(
    start_stack: StartStack, thinking_model: Path, thinking: Tokenizer
) -> None:
    """And nobody waits for it meanwhile."""
    stack = await start_stack(model=thinking_model)
    script(stack, thinking, f'"{"a" * 60}b"')
    async with asyncio.TaskGroup() as group:
        costly = group.create_task(whole(stack, "completions", guided_json=COSTLY))
        slowest = 0.0
        while not costly.done():
            began = time.monotonic()
            assert (await stack.client.get("/health")).status_code == 200
            slowest = max(slowest, time.monotonic() - began)
    (told,) = costly.result()["schema_violations"]
    assert "could not be checked" in told["message"]
    assert "too much time" in told["message"]
    assert slowest < 2


async def test_one_check_of_a_request_that_takes_too_long_is_the_last(
    start_stack: StartStack, thinking_model: Path, thinking: Tokenizer
) -> None:
    stack = await start_stack(model=thinking_model)
    script(stack, thinking, f'"{"a" * 60}b"')
    response = await stack.complete(guided_json=COSTLY, n=8)
    for choice in response.json()["choices"]:
        assert "too much time" in choice["schema_violations"][0]["message"]
    metrics = (await stack.client.get("/metrics")).text
    assert 'text_process_ends_total{cause="grammar"} 1.0' in metrics


async def test_a_server_may_refuse_what_it_would_have_to_check(
    start_stack: StartStack, thinking_model: Path
) -> None:
    stack = await start_stack(model=thinking_model, structured_outputs_config={"lenient": False})
    refused = await stack.chat(structured_outputs={"json": TAGS})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "structured_outputs.json.properties.tags"
    assert "uniqueItems" in refused.json()["error"]["message"]


async def test_tags_are_exact(stack: Stack) -> None:
    """Nothing would say where in a text such a schema was not kept to."""
    tags = {"begin": "<f>", "schema": TAGS, "end": "</f>"}
    kind = {"type": "structural_tag", "structures": [tags], "triggers": ["<f"]}
    refused = await stack.chat(response_format=kind)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == (
        "response_format.structures[0].schema.properties.tags"
    )
