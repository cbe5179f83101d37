"""Tools of the Responses API that are no plain functions: what the model is told, and what of its calls."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from support.clients.response_calls import TOOLS, events_of, official, respond, without_chance
from support.clients.tool_chat import script, tool_stack
from support.processes.gateway_stack import Stack, StartStack
from surestep_gateway.apis.responses import tools as response_tools
from surestep_gateway.apis.responses.tools import LEFT_OUT
from surestep_gateway.request.parse import INCLUDED
from surestep_gateway.text.tokenizer import Tokenizer

PATCH = '*** Begin Patch\n*** Add File: a.txt\n+"Zürich" \\ 🙂\n*** End Patch\n'
GRAMMAR = 'start: "*** Begin Patch" /(?s:.*)/'
CUSTOM = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Edits files.",
    "format": {"type": "grammar", "syntax": "lark", "definition": GRAMMAR},
}
SPACE: dict[str, Any] = {
    "type": "namespace",
    "name": "agents",
    "description": "Other agents.",
    "tools": [{"type": "function", "name": "wait"}, {"type": "custom", "name": "ask"}],
}
MCP = {"type": "namespace", "name": "mcp__files__", "tools": [{"type": "function", "name": "ls"}]}
DEFAULT = {"type": "namespace", "name": "functions", "tools": [{"type": "custom", "name": "exec"}]}
SEARCH = {"type": "tool_search", "execution": "client", "parameters": {"type": "object"}}
OFFERED: list[dict[str, Any]] = [*TOOLS, CUSTOM, SPACE, MCP, DEFAULT, SEARCH]


def called(name: str, arguments: Any) -> str:
    """The output that calls a function."""
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return f'</think><tool_call>\n{{"name": "{name}", "arguments": {text}}}\n</tool_call>'


CALLS: dict[str, tuple[str, dict[str, Any]]] = {
    "function": (
        called("weather", {"city": "Oslo"}),
        {"type": "function_call", "name": "weather", "arguments": '{"city": "Oslo"}'},
    ),
    "custom": (
        called("apply_patch", {"input": PATCH}),
        {"type": "custom_tool_call", "name": "apply_patch", "input": PATCH},
    ),
    "custom-by-another-key": (
        called("apply_patch", {"patch": PATCH}),
        {"type": "custom_tool_call", "name": "apply_patch", "input": PATCH},
    ),
    "custom-without-text": (
        called("apply_patch", {"lines": 2}),
        {"type": "custom_tool_call", "name": "apply_patch", "input": '{"lines": 2}'},
    ),
    "namespace": (
        called("agents__wait", {}),
        {"type": "function_call", "name": "wait", "namespace": "agents", "arguments": "{}"},
    ),
    "custom-in-a-namespace": (
        called("agents__ask", {"input": "Who?"}),
        {"type": "custom_tool_call", "name": "ask", "namespace": "agents", "input": "Who?"},
    ),
    "mcp": (
        called("mcp__files__ls", {}),
        {"type": "function_call", "name": "ls", "namespace": "mcp__files__", "arguments": "{}"},
    ),
    "default-namespace": (
        called("exec", {"input": "1 + 1"}),
        {"type": "custom_tool_call", "name": "exec", "namespace": "functions", "input": "1 + 1"},
    ),
    "search": (
        called("tool_search", {"query": "files"}),
        {"type": "tool_search_call", "execution": "client", "arguments": {"query": "files"}},
    ),
}


@pytest.fixture
async def stack(start_stack: StartStack, thinking_model: Path) -> Stack:
    """A gateway that parses reasoning and hermes calls."""
    return await tool_stack(start_stack, thinking_model, "hermes")


def prompt(stack: Stack, tokenizer: Tokenizer) -> str:
    """The latest prompt."""
    ids = stack.scheduler.requests[-1].prompt_ids
    return tokenizer.decode(ids, skip_special_tokens=False)


@pytest.mark.parametrize(("output", "item"), CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("within", ["tools", "input"])
@pytest.mark.rotates(1)
async def test_calls_are_what_the_client_offered(
    stack: Stack, thinking: Tokenizer, output: str, item: dict[str, Any], within: str
) -> None:
    """Whole and streamed, and read back as the model wrote them."""
    more = {"type": "additional_tools", "role": "developer", "tools": OFFERED}
    said = {"role": "user", "content": "hello"}
    asked: dict[str, Any] = {"tools": OFFERED} if within == "tools" else {"input": [more, said]}
    script(stack, thinking, output)
    whole = (await respond(stack, **asked)).json()
    found = whole["output"][-1]
    assert {key: found.get(key) for key in item} == item
    assert found["status"] == "completed"
    assert found["call_id"].startswith("call_")
    assert "namespace" in item or "namespace" not in found
    script(stack, thinking, output, chunk=2)
    events = await events_of(stack, **asked)
    assert without_chance(events[-1]["response"]) == without_chance(whole)
    assert events[-1]["response"]["output"][-1] == events[-2]["item"]
    told = [event["delta"] for event in events if event["type"].endswith("_input.delta")]
    assert "".join(told) == item.get("input", "")
    result = {"type": f"{item['type']}_output", "call_id": found["call_id"], "output": "fine"}
    if item["type"] == "tool_search_call":
        result = {"type": "tool_search_output", "call_id": found["call_id"], "tools": [CUSTOM]}
    script(stack, thinking, "</think>Done.")
    again = await respond(stack, **asked | {"input": [said, found, result]})
    assert again.status_code == 200, again.text
    read = prompt(stack, thinking)
    name = json.loads(output.split("<tool_call>\n")[1].split("\n")[0])["name"]
    assert f"[{name} " in read or f"[{name}]" in read
    assert ("apply_patch" if "tools" in result else "fine") in read


async def test_the_response_shows_what_was_offered(stack: Stack, thinking: Tokenizer) -> None:
    script(stack, thinking, "</think>x")
    assert (await respond(stack, tools=OFFERED)).json()["tools"] == OFFERED
    assert "agents__wait,agents__ask,mcp__files__ls,exec" in prompt(stack, thinking)


async def test_what_nobody_can_run_is_left_out(
    stack: Stack, thinking: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    """With a line in the log, and not in the tools that the response shows."""
    response_tools._note_left_out.cache_clear()
    script(stack, thinking, "</think>x")
    kinds = sorted(LEFT_OUT)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            asked = {"tools": [*TOOLS, *({"type": one} for one in kinds)], "include": INCLUDED}
            body = (await respond(stack, **asked)).json()
    assert body["tools"] == TOOLS
    assert "web_search" not in prompt(stack, thinking)
    lines = [one.getMessage() for one in caplog.records if "left out" in one.getMessage()]
    assert len(lines) == len(kinds)
    only = await respond(stack, tools=[{"type": "web_search"}], tool_choice="auto")
    assert (only.status_code, only.json()["tools"]) == (200, [])


async def test_a_wrong_schema_is_named_where_it_is(stack: Stack) -> None:
    wrong = {"type": "function", "name": "bad", "strict": True, "parameters": {"type": "nothing"}}
    space = {"type": "namespace", "name": "n", "tools": [SPACE["tools"][0], wrong]}
    more = {"type": "additional_tools", "tools": [space]}
    said = {"role": "user", "content": "hello"}
    for asked, place in (
        ({"tools": [*OFFERED, space]}, f"tools[{len(OFFERED)}].tools[1]"),
        ({"input": [said, more], "tools": TOOLS}, "input[1].tools[0].tools[1]"),
    ):
        error = (await respond(stack, **asked)).json()["error"]
        assert error["param"].startswith(f"{place}.parameters")
        assert place in error["message"]


@pytest.mark.parametrize("mode", ["auto", "required"])
async def test_allowed_tools_are_all_that_is_called(
    stack: Stack, thinking: Tokenizer, mode: str
) -> None:
    """By a grammar, in chats too; the prompt has all of them."""
    script(stack, thinking, called("weather", {"city": "Oslo", "days": 1}))
    flat = [{"type": "function", "name": "weather"}, {"type": "web_search"}]
    choice: dict[str, Any] = {"type": "allowed_tools", "mode": mode, "tools": flat}
    body = (await respond(stack, tools=OFFERED, tool_choice=choice)).json()
    assert body["tool_choice"] == choice
    assert body["output"][-1]["name"] == "weather"
    source = stack.scheduler.requests[-1].sampling.grammar.source
    assert "weather" in source
    assert "book" not in source
    assert ("TOLD" in source) == (mode == "auto")
    assert "mcp__files__ls" in prompt(stack, thinking)
    tools = [
        {"type": "function", "function": {k: v for k, v in one.items() if k != "type"}}
        for one in TOOLS
    ]
    named = [{"type": "function", "function": {"name": "weather"}}]
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": named}}
    answer = await stack.chat(tools=tools, tool_choice=allowed)
    assert answer.status_code == 200, answer.text
    assert stack.scheduler.requests[-1].sampling.grammar.source == source
    named[0]["function"] = {"name": "nobody"}
    refused = await stack.chat(tools=tools, tool_choice=allowed)
    assert refused.json()["error"]["param"] == "tool_choice"


async def test_forced_by_their_kinds(stack: Stack, thinking: Tokenizer) -> None:
    script(stack, thinking, called("agents__ask", {"input": "x"}))
    for choice, name in (
        ({"type": "custom", "name": "apply_patch"}, "apply_patch"),
        ({"type": "function", "name": "wait", "namespace": "agents"}, "agents__wait"),
        ({"type": "tool_search"}, "tool_search"),
        ({"type": "namespace", "name": "agents"}, "agents__ask"),
    ):
        response = await respond(stack, tools=OFFERED, tool_choice=choice)
        assert response.status_code == 200, response.text
        source = stack.scheduler.requests[-1].sampling.grammar.source
        assert name in source
        assert "weather" not in source
    unknown = {"type": "custom", "name": "nobody"}
    error = (await respond(stack, tools=OFFERED, tool_choice=unknown)).json()["error"]
    assert error["param"] == "tool_choice"
    assert "names 'nobody'" in error["message"]


HISTORY: list[tuple[dict[str, Any], str | None]] = [
    ({"type": "local_shell_call", "call_id": "c", "action": {"command": ["ls"]}}, "local_shell"),
    ({"type": "local_shell_call_output", "id": "c", "output": "a.txt"}, "a.txt"),
    ({"type": "agent_message", "author": "b", "content": [{"text": "I am b."}]}, "I am b."),
    ({"type": "reasoning", "summary": [], "content": None, "encrypted_content": "xyz"}, None),
    ({"type": "web_search_call", "status": "completed", "action": {"query": "q"}}, None),
    ({"type": "image_generation_call", "id": "ig_1", "result": "AAAA"}, None),
    ({"type": "compaction", "encrypted_content": "xyz"}, None),
    (
        {"type": "custom_tool_call_output", "call_id": "c", "output": [{"type": "input_image"}]},
        "input_image left out",
    ),
]


@pytest.mark.parametrize(("item", "text"), HISTORY, ids=[one["type"] for one, _ in HISTORY])
async def test_histories_are_read_and_stored(
    stack: Stack, thinking: Tokenizer, item: dict[str, Any], text: str | None
) -> None:
    """Items of any server may be in a conversation that goes on here."""
    script(stack, thinking, "</think>Fine.")
    said = {"role": "user", "content": "hello"}
    first = await respond(stack, input=[said, item, said], tools=TOOLS)
    assert first.status_code == 200, first.text
    read = prompt(stack, thinking)
    assert text is None or text in read
    assert "xyz" not in read
    second = await respond(stack, previous_response_id=first.json()["id"], input="And?")
    assert second.status_code == 200, second.text
    async with official(stack) as client:
        page = await client.responses.input_items.list(second.json()["id"], order="asc")
    assert item["type"] in [one.type for one in page.data]
