from __future__ import annotations

import json

import pytest
from support.clients.parser_cases import calls_of, contents_of, output_parser, parse
from surestep_gateway.parsers import Content, ToolArguments, ToolCallEnd, ToolCallStart, coalesce

CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'


def test_a_call_after_text() -> None:
    assert parse(output_parser("hermes"), ["Let me look.\n", CALL]) == [
        Content("Let me look."),
        ToolCallStart(0, "weather"),
        ToolArguments(0, '{"city": "Paris"}'),
        ToolCallEnd(0),
    ]


def test_two_calls_with_text_around() -> None:
    second = '<tool_call>{"name": "book", "arguments": {}}</tool_call>'
    events = parse(output_parser("hermes"), [f"\n{CALL}\n{second}\n done \n"])
    assert calls_of(events) == [("weather", '{"city": "Paris"}'), ("book", "{}")]
    assert contents_of(events) == ["\n done \n"]


def test_arguments_are_passed_on_while_they_are_written() -> None:
    parser = output_parser("hermes")
    assert coalesce(parser.push('<tool_call>{"name": "weather", "arg')) == []
    assert coalesce(parser.push('uments": {"ci')) == [
        ToolCallStart(0, "weather"),
        ToolArguments(0, '{"ci'),
    ]
    assert coalesce(parser.push('ty": "Par')) == [ToolArguments(0, 'ty": "Par')]
    assert coalesce(parser.finish()) == [ToolCallEnd(0)]


@pytest.mark.parametrize(
    "arguments",
    [
        r'{"text": "a \"quoted\" } brace, a \\"}',
        r'{"text": "</tool_call>", "emoji": "é🙂", "escaped": "\ud83d\ude42 \u00e9"}',
        '{"deep": [{"a": [1, {}]}, "]"], "n": -1.5e3, "t": true, "x": null}',
        '{ "spaced" :\n\t"x" }',
        "{}",
    ],
)
def test_arguments_are_what_the_model_wrote(arguments: str) -> None:
    first = '<tool_call>\n{"name": "weather", "arguments": ' + arguments + "}\n</tool_call>"
    last = '<tool_call>{"arguments": ' + arguments + ', "name": "weather"}</tool_call>'
    events = parse(output_parser("hermes"), [first + last])
    assert calls_of(events) == [("weather", arguments)] * 2
    assert contents_of(events) == []
    json.loads(arguments)


def test_a_call_without_arguments() -> None:
    events = parse(output_parser("hermes"), ['<tool_call>{"name": "weather"}</tool_call>'])
    assert calls_of(events) == [("weather", "{}")]


@pytest.mark.parametrize(
    "text",
    [
        "The <tool_call> tag opens a call.",
        '<tool_call>{"name": weather}</tool_call>',
        '<tool_call>{"name": "", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "bad \\x escape", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "two\nlines", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "weather", "arguments": [1]}</tool_call>',
        '<tool_call>{"name": "weather", "args": {}}</tool_call>',
        '<tool_call>{"name": "weather", "arguments": "Paris"}</tool_call>',
        '<tool_call>{"arguments": {"a": 1}}</tool_call>',
        '<tool_call>{"arguments": {"a": <b>}, "name": "weather"}</tool_call>',
        "<tool_call>[]</tool_call> and more",
        "a <tool_ call> b",
    ],
)
def test_what_is_no_call_stays_content(text: str) -> None:
    assert parse(output_parser("hermes"), [text]) == [Content(text)]


def test_a_call_follows_what_was_none() -> None:
    events = parse(output_parser("hermes"), ["<tool_call> ", "<tool_call>", CALL])
    assert contents_of(events) == ["<tool_call> <tool_call>"]
    assert calls_of(events) == [("weather", '{"city": "Paris"}')]


@pytest.mark.parametrize(
    ("tail", "content"),
    [
        ("\n</tool_call>", []),  # a brace too few
        ("}}}\n</tool_call>", []),  # too many
        (', "id": "3"}</tool_call>', []),
        (', "note": 3}</tool_call>', [', "note": 3}']),
        ("} wait\n</tool_call>!", ["wait\n", "!"]),
        ("", []),
        ("}\n</tool_", []),
    ],
)
def test_what_follows_the_arguments(tail: str, content: list[str]) -> None:
    text = '<tool_call>{"name": "weather", "arguments": {"a": 1}' + tail
    events = parse(output_parser("hermes"), [text])
    assert calls_of(events) == [("weather", '{"a": 1}')]
    assert contents_of(events) == content


def test_an_object_that_is_never_closed_ends_at_the_marker() -> None:
    text = '<tool_call>{"name": "weather", "arguments": {"a": {"b": 1}\n</tool_call>' + CALL
    events = parse(output_parser("hermes"), [text])
    assert calls_of(events) == [("weather", '{"a": {"b": 1}\n'), ("weather", '{"city": "Paris"}')]


@pytest.mark.parametrize("end", range(1, len(CALL)))
def test_a_call_cut_short(end: int) -> None:
    """Before it is announced it is content, afterwards what there is of its arguments."""
    events = parse(output_parser("hermes"), [CALL[:end]])
    begin = CALL.index('{"city"')
    if end <= begin:
        assert events == [Content(CALL[:end])]
    else:
        arguments = CALL[begin : min(end, CALL.index("}") + 1)]
        assert calls_of(events) == [("weather", arguments)]
        assert contents_of(events) == []


def test_space_at_the_end_is_content_unless_a_call_stands_before_it() -> None:
    assert parse(output_parser("hermes"), ["a ", "\n"]) == [Content("a \n")]
    assert contents_of(parse(output_parser("hermes"), [CALL, " \n"])) == []


LLAMA = '{"name": "weather", "parameters": {"city": "Os\\"}lo", "days": 2}}'


@pytest.mark.parametrize("lead", ["", "\n ", "<|python_tag|>"])
def test_llama_writes_calls_without_markers(lead: str) -> None:
    events = parse(output_parser("llama3_json"), [f"{lead}{LLAMA}; {LLAMA}\n"])
    assert calls_of(events) == [("weather", '{"city": "Os\\"}lo", "days": 2}')] * 2
    assert contents_of(events) == []


@pytest.mark.parametrize(
    "text",
    [
        '{"a": ' + LLAMA + "}",
        "So {weather} and [weather] and ```weather``` are",
        '{"name": "Bob", "parameters": {}}',
        '{"name": "weather"}',
        '{"a": [1, {"b": 2}]}',
        "; {",
        "{",
    ],
)
def test_other_json_of_llama_is_content(text: str) -> None:
    assert parse(output_parser("llama3_json"), [text]) == [Content(text)]


def test_llama_goes_on_after_a_call() -> None:
    events = parse(output_parser("llama3_json"), [f"{LLAMA} and <|python_tag|>{LLAMA};x"])
    assert len(calls_of(events)) == 2
    assert contents_of(events) == [" and", ";x"]
