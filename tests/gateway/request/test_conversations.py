"""Conversations as clients write them, under templates as they are published: what the model reads."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from support.clients.prompt_reader import TEMPLATES, WITHOUT_SYSTEM, Reader
from surestep_common.errors import UnsupportedParameter
from surestep_gateway.apis.messages.request import draft_message
from surestep_gateway.apis.responses.request import draft_response
from surestep_gateway.request.prepare import draft_chat

pytestmark = pytest.mark.timeout(300)  # packages are fetched the first time

CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
IMAGE: dict[str, Any] = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}


@pytest.fixture
def reader(request: pytest.FixtureRequest, readers: Callable[[str], Reader]) -> Reader:
    return readers(getattr(request, "param", "qwen3"))


every_template = pytest.mark.parametrize("reader", TEMPLATES, indirect=True)
instructed = pytest.mark.parametrize("reader", [*TEMPLATES, *WITHOUT_SYSTEM], indirect=True)


def said(role: str, content: Any, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


@instructed
@pytest.mark.rotates(1)
def test_developers_instruct(reader: Reader) -> None:
    """Qwen3's template drops the role in silence, Qwen3.5's refuses it."""
    asked = said("user", "Hi")
    by_system = reader.chat(said("system", "Be brief."), asked)
    assert "Be brief." in by_system
    assert reader.chat(said("developer", "Be brief."), asked) == by_system
    parts = [{"type": "text", "text": "Be brief."}]
    assert reader.chat(said("developer", parts), asked) == by_system


@instructed
@pytest.mark.rotates(1)
def test_all_instructions_are_read(reader: Reader) -> None:
    prompt = reader.chat(
        said("system", "One."),
        said("developer", "Two."),
        said("user", "Three."),
        said("assistant", "Four."),
        said("system", [{"type": "text", "text": "Five."}]),
        said("user", "Six."),
    )
    for word in ("One.", "Two.", "Three.", "Four.", "Five.", "Six."):
        assert prompt.count(word) == 1


@pytest.mark.parametrize("reader", ["qwen3", "qwen3.5", "gemma3"], indirect=True)
def test_instructions_stay_where_the_template_has_a_place_for_them(
    reader: Reader, request: pytest.FixtureRequest
) -> None:
    messages = said("system", "One."), said("user", "Two."), said("system", "Three.")
    prompt = reader.chat(*messages)
    late = prompt.index("Three.") > prompt.index("Two.")
    assert late == (request.node.callspec.params["reader"] == "qwen3")


@pytest.mark.parametrize("reader", ["qwen3", "qwen3.5"], indirect=True)
@pytest.mark.parametrize(
    "part",
    [
        {"type": "thinking", "thinking": "I wonder"},
        {"type": "thinking", "thinking": [{"type": "text", "text": "I wonder"}]},
        {"type": "reasoning", "text": "I wonder"},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "I wonder"}]},
    ],
    ids=lambda part: "-".join(part),
)
def test_thoughts_among_the_parts_are_reasoning(reader: Reader, part: Any) -> None:
    asked, told = said("user", "Hi"), [part, {"text": "So."}]
    answered = said("assistant", "So.", reasoning="I wonder")
    assert reader.chat(asked, said("assistant", told)) == reader.chat(asked, answered)
    last = said("user", "And?")
    redacted = said("assistant", [{"type": "redacted_thinking", "data": "x"}, {"text": "So."}])
    plain = reader.chat(asked, said("assistant", "So."), last)
    assert reader.chat(asked, redacted, last) == plain


RESULTS: list[tuple[Any, str]] = [
    ([{"type": "text", "text": "7 degrees"}], "7 degrees"),
    ([{"text": "7 degrees"}], "7 degrees"),
    ([{"text": "7 degrees"}, IMAGE], "7 degrees\n[image_url left out: only text is read here]"),
    ([{"type": "tool_reference", "tool_name": "weather"}], "weather"),
    ([{"type": "search_result", "content": [{"type": "text", "text": "7 degrees"}]}], "7 degrees"),
    ([{"type": ["x"]}], "[['x'] left out: only text is read here]"),
]


@pytest.mark.parametrize(("content", "text"), RESULTS, ids=range(len(RESULTS)))
def test_results_of_any_kind_are_text(reader: Reader, content: Any, text: str) -> None:
    asked, called = said("user", "Hi"), said("assistant", "", tool_calls=[CALL])
    messages = asked, called, said("tool", content, tool_call_id="c1")
    assert f"<tool_response>\n{text}\n</tool_response>" in reader.chat(*messages, tools=TOOLS)
    items = [
        {"role": "user", "content": "Hi"},
        {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": content},
    ]
    assert f"\n{text}\n" in reader.read(draft_response, input=items)
    used = {"type": "tool_use", "id": "c1", "name": "f", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "c1", "content": content}
    turns = [said("user", "Hi"), said("assistant", [used]), said("user", [result])]
    assert f"\n{text}\n" in reader.read(draft_message, messages=turns)


PICTURES: dict[str, tuple[Any, Any]] = {  # by the request's kind: a picture, and its result
    "chat": (IMAGE, said("tool", "7 degrees", tool_call_id="c1")),
    "message": (
        {"type": "image", "source": {"type": "base64", "data": "AAAA"}},
        said("user", [{"type": "tool_result", "tool_use_id": "c1", "content": "7 degrees"}]),
    ),
    "response": (
        {"type": "input_image", "image_url": IMAGE["image_url"]["url"]},
        {"type": "function_call_output", "call_id": "c1", "output": "7 degrees"},
    ),
}


@pytest.mark.parametrize("kind", PICTURES)
@pytest.mark.parametrize("beside", [True, False])
def test_a_picture_that_a_tool_read_ends_no_session(
    reader: Reader, kind: str, beside: bool
) -> None:
    """Clients put it behind the result, where it stays for good; others are refused."""
    picture, result = PICTURES[kind]
    asked, text = (
        said("user", "Hi"),
        {"type": "input_text" if kind == "response" else "text", "text": "See here:"},
    )
    called: Any = {
        "chat": said("assistant", "", tool_calls=[CALL]),
        "message": said("assistant", [{"type": "tool_use", "id": "c1", "name": "f", "input": {}}]),
        "response": {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"},
    }[kind]
    shown = [said("user", [text]), said("user", [text, picture])]
    answered = said("assistant", "So.")
    behind = [*shown, answered] if beside else [answered, *shown]
    messages = [asked, called, result, *behind, asked]
    draft: Any = {"chat": draft_chat, "message": draft_message, "response": draft_response}[kind]
    field = "input" if kind == "response" else "messages"
    if beside:
        prompt = reader.read(draft, **{field: messages})
        note = f"[{picture['type']} left out: only text is read here]"
        assert prompt.count(note) == 1
        assert "AAAA" not in prompt
        assert prompt.count("See here:") == 2
        return
    with pytest.raises(UnsupportedParameter) as refused:
        reader.read(draft, **{field: messages})
    assert picture["type"] in str(refused.value)


BILL = "x-anthropic-billing-header: cc_version=2.1.9; cc_entrypoint=cli; cch={};"


@pytest.mark.parametrize("reader", ["qwen3", "qwen3.5"], indirect=True)
def test_claude_codes_bill_is_not_read(reader: Reader) -> None:
    messages = [said("user", "Hi"), said("system", "Be brief."), said("user", "Now?")]
    plain = reader.read(draft_message, system="You help.", messages=messages)
    for system in (
        [{"type": "text", "text": BILL.format("a1")}, {"type": "text", "text": "You help."}],
        f"{BILL.format('b2')}\nYou help.",
    ):
        assert reader.read(draft_message, system=system, messages=messages) == plain
    told = "Say x-anthropic-billing-header: 1"
    assert told in reader.read(draft_message, system=told, messages=messages)


@pytest.mark.parametrize("reader", ["gemma3", "qwen3"], indirect=True)
def test_neighbours_are_one_where_roles_must_alternate(
    reader: Reader, request: pytest.FixtureRequest
) -> None:
    """Codex says where it runs in a message of its own, ahead of the user's."""
    where: Any = [{"type": "text", "text": "In a folder."}]
    rest = said("assistant", "So."), said("user", "And?")
    prompt = reader.chat(said("user", where), said("user", "Hi"), *rest)
    joined = reader.chat(said("user", "In a folder.\n\nHi"), *rest)
    assert (prompt == joined) == (request.node.callspec.params["reader"] == "gemma3")
    assert prompt.index("In a folder.") < prompt.index("Hi")


def test_tools_of_responses_are_described(reader: Reader) -> None:
    """A namespace by the first of its functions, a custom tool with its grammar."""
    functions = [{"type": "function", "name": name, "description": "Waits."} for name in "ab"]
    space = {"type": "namespace", "name": "n", "description": "Agents.", "tools": functions}
    grammar = {"type": "grammar", "syntax": "lark", "definition": "start: /x+/"}
    custom = {"type": "custom", "name": "patch", "description": "Edits.", "format": grammar}
    prompt = reader.read(draft_response, input="Hi", tools=[space, custom])
    told = [json.loads(line) for line in prompt.splitlines() if line.startswith('{"type"')]
    first, second, third = (tool["function"] for tool in told)
    assert (first["name"], first["description"]) == ("n__a", "Agents.\n\nWaits.")
    assert (second["name"], second["description"]) == ("n__b", "Waits.")
    assert third["description"].startswith("Edits.\n\n")
    assert third["description"].endswith("lark grammar:\nstart: /x+/")
    assert third["parameters"]["required"] == ["input"]
