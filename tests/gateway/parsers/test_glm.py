"""Reasoning and calls of GLM-4.5 and its successors."""

from __future__ import annotations

import json

import pytest
from support.clients.parser_cases import calls_of, contents_of, output_parser, parse
from surestep_gateway.parsers import (
    Content,
    Reasoning,
    ToolArguments,
    ToolCallEnd,
    ToolCallStart,
    coalesce,
)

LINES = (
    "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n"
    "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>"
)
DENSE = LINES.replace("\n", "")


@pytest.mark.parametrize("call", [LINES, DENSE])
def test_a_call_and_one_without_arguments(call: str) -> None:
    events = parse(output_parser("glm47"), [f"Two:\n{call}\n<tool_call>book</tool_call>\nThere."])
    assert events == [
        Content("Two:"),
        ToolCallStart(0, "weather"),
        ToolArguments(0, '{"city": "Paris", "days": 3}'),
        ToolCallEnd(0),
        ToolCallStart(1, "book"),
        ToolArguments(1, "{}"),
        ToolCallEnd(1),
        Content("\nThere."),
    ]


@pytest.mark.parametrize(
    "value", ["", "3", "null", "\n a\n", 'say "é" \\', "</tool_call>", "</arg"]
)
def test_strings_are_kept(value: str) -> None:
    call = DENSE.replace("Paris", value)
    assert json.loads(calls_of(parse(output_parser("glm45"), [call]))[0][1])["city"] == value


def test_strings_are_passed_on_while_they_are_written() -> None:
    parser = output_parser("glm45")
    parser.push("<tool_call>weather<arg_key>city</arg_key><arg_value>Pa")
    assert coalesce(parser.push("ris")) == [ToolArguments(0, "ris")]


@pytest.mark.parametrize(
    ("text", "arguments", "content"),
    [
        (DENSE.replace("<arg_value>3</arg_value>", ""), '{"city": "Paris", "days": null}', []),
        (
            DENSE.replace("<arg_value>Paris</arg_value>", ""),
            '{"city": null, "days": 3}',
            [],
        ),
        (LINES.replace("\n</tool_call>", " so </tool_call>"), None, ["so "]),
        (DENSE[: DENSE.index("3")], '{"city": "Paris", "days": ""', []),
        (DENSE[: DENSE.index("is</")], '{"city": "Par', []),
    ],
)
def test_calls_with_mistakes(text: str, arguments: str | None, content: list[str]) -> None:
    events = parse(output_parser("glm45"), [text])
    assert calls_of(events) == [("weather", arguments or '{"city": "Paris", "days": 3}')]
    assert contents_of(events) == content


@pytest.mark.parametrize(
    "text",
    [
        "The <tool_call> tag and the </tool_call> tag.",
        "<tool_call></tool_call>",
        "<tool_call>\n<arg_key>city</arg_key>",
        "<tool_call>weather",
        '<tool_call>{"name": "weather", "arguments": {}}</tool_call>',
    ],
)
def test_what_is_no_call_stays_content(text: str) -> None:
    assert parse(output_parser("glm45"), [text]) == [Content(text)]


@pytest.mark.parametrize("prompt", ["<|assistant|>", "<|assistant|><think>"])
def test_a_call_ends_the_reasoning(prompt: str) -> None:
    opened = "" if prompt.endswith(">") and "think" in prompt else "\n<think>"
    parser = output_parser("glm45", reasoning="glm45", prompt=prompt)
    events = parse(parser, [f"{opened}why\n{DENSE}"])
    assert events[0] == Reasoning("why")
    assert calls_of(events) == [("weather", '{"city": "Paris", "days": 3}')]
    assert contents_of(events) == []


def test_without_tools_a_marker_in_the_reasoning_is_text() -> None:
    parser = output_parser(None, reasoning="glm45", tools_of={})
    assert parse(parser, ["the <tool_call> tag</think>so"]) == [
        Reasoning("the <tool_call> tag"),
        Content("so"),
    ]


def test_stray_ends_of_reasoning_are_dropped() -> None:
    def read(text: str, prompt: str) -> list[object]:
        return [*parse(output_parser("glm45", reasoning="glm47", prompt=prompt), [text])]

    assert read("</think>so</think>", "<|assistant|></think>") == [Content("so")]
    assert read("why</think>\n</think>so </th", "<think>") == [Reasoning("why"), Content("so </th")]
    argued = DENSE.replace("Paris", "a </think> b")
    assert calls_of(
        parse(output_parser("glm45", reasoning="glm45", prompt="</think>"), [argued])
    ) == [("weather", '{"city": "a </think> b", "days": 3}')]
