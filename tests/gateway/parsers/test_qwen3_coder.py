from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from support.clients.parser_cases import calls_of, contents_of, output_parser, parse
from surestep_gateway.parsers import Content, ToolArguments, ToolCallEnd, ToolCallStart, coalesce
from surestep_gateway.parsers.qwen3_coder import Qwen3CoderToolParser
from surestep_gateway.parsers.schema import json_text, json_types


def call(name: str, **parameters: str) -> str:
    """A call as the chat template lays it out."""
    tags = (f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in parameters.items())
    return f"<tool_call>\n<function={name}>\n{''.join(tags)}</function>\n</tool_call>"


def arguments(text: str) -> Any:
    """The arguments of the one call in `text`."""
    ((_, found),) = calls_of(parse(output_parser("qwen3_coder"), [text]))
    return json.loads(found)


def test_calls_among_text() -> None:
    text = f"Two:\n{call('weather', city='Paris', days='3')}\n{call('book')}\nThere."
    assert parse(output_parser("qwen3_coder"), [text]) == [
        Content("Two:"),
        ToolCallStart(0, "weather"),
        ToolArguments(0, '{"city": "Paris", "days": 3}'),
        ToolCallEnd(0),
        ToolCallStart(1, "book"),
        ToolArguments(1, "{}"),
        ToolCallEnd(1),
        Content("\nThere."),
    ]


def test_strings_are_passed_on_while_they_are_written() -> None:
    parser = output_parser("qwen3_coder")
    assert coalesce(parser.push("<tool_call>\n<function=weather>\n<par")) == [
        ToolCallStart(0, "weather")
    ]
    assert coalesce(parser.push("ameter=city>\nPa")) == [ToolArguments(0, '{"city": "Pa')]
    assert coalesce(parser.push("ris\n")) == [ToolArguments(0, "ris")]
    assert coalesce(parser.push("</parameter>")) == [ToolArguments(0, '"')]
    assert coalesce(parser.push("<parameter=days>1")) == [ToolArguments(0, ', "days": ')]
    assert coalesce(parser.push("2</parameter></function>")) == [ToolArguments(0, "12}")]


@pytest.mark.parametrize(
    "value",
    [
        "",
        "x",
        "\n",
        "\n\nx\n\n",
        'say "hi" \\ \t',
        "é🙂",
        "3",
        "null",
        "a <b> </param",
        "</function>",
    ],
)
def test_strings_are_kept(value: str) -> None:
    assert arguments(call("weather", city=value)) == {"city": value}
    assert arguments(call("weather", unknown=value)) == {"unknown": value}


def test_values_without_layout() -> None:
    text = (
        "<tool_call><function=weather><parameter=city>a b</parameter><parameter=days>2</parameter>"
    )
    assert arguments(text + "</function></tool_call>") == {"city": "a b", "days": 2}
    assert arguments(call("weather").replace("</f", "<parameter=city>\n</parameter></f")) == {
        "city": ""
    }


def test_what_the_format_has_no_place_for_is_content() -> None:
    text = call("weather", city="x").replace("\n</function>", "\nand </function>\nso")
    events = parse(output_parser("qwen3_coder"), [text])
    assert calls_of(events) == [("weather", '{"city": "x"}')]
    assert contents_of(events) == ["and ", "so\n"]


def test_a_function_that_is_never_closed() -> None:
    text = call("weather", city="x").replace("</function>", "") + call("book")
    events = parse(output_parser("qwen3_coder"), [text])
    assert calls_of(events) == [("weather", '{"city": "x"}'), ("book", "{}")]


@pytest.mark.parametrize(
    "text",
    [
        "The <tool_call> tag.",
        "<tool_call>\n<function=>\n</function>\n</tool_call>",
        "<tool_call>\n<function=two\nlines>\n</function>\n</tool_call>",
        '<tool_call>{"name": "weather", "arguments": {}}</tool_call>',
        "<function=other></function>",
        "`<function=weather>` calls it.",
    ],
)
def test_what_is_no_call_stays_content(text: str) -> None:
    assert parse(output_parser("qwen3_coder"), [text]) == [Content(text)]


@pytest.mark.parametrize(
    ("last", "arguments"),
    [
        ("<function=weather>", ""),
        ("city>\n", '{"city": "'),
        ("\nOs", '{"city": "Os'),
        ("Oslo\n</par", '{"city": "Oslo\\n</par'),
        ("Oslo\n</parameter>", '{"city": "Oslo"}'),  # it may be whole
        ("<parameter=da", '{"city": "Oslo", "da'),
        ("days>\n1", '{"city": "Oslo", "days": 1'),
        ("12\n</parameter>", '{"city": "Oslo", "days": 12}'),
        ("</function>", '{"city": "Oslo", "days": 12}'),
    ],
)
def test_a_call_cut_short(last: str, arguments: str) -> None:
    whole = call("weather", city="Oslo", days="12")
    cut = whole[: whole.index(last) + len(last)]
    events = parse(output_parser("qwen3_coder"), [cut])
    assert calls_of(events) == [("weather", arguments)]
    assert contents_of(events) == []


def test_a_call_cut_short_before_its_name_is_content() -> None:
    cut = "<tool_call>\n<function=weathe"
    assert parse(output_parser("qwen3_coder"), [cut]) == [Content(cut)]


@pytest.mark.parametrize(
    ("text", "types", "value"),
    [
        ("3", {"integer"}, 3),
        (" -3 ", {"integer"}, -3),
        ("3.5", {"integer"}, "3.5"),
        ("3.0", {"integer"}, 3.0),
        ("3.5", {"number"}, 3.5),
        ("3", {"number"}, 3),
        ("true", {"boolean"}, True),
        ("False", {"boolean"}, False),
        ("yes", {"boolean"}, "yes"),
        ("None", {"string", "null"}, None),
        ("null", {"integer", "null"}, None),
        ("null", {"integer"}, "null"),
        ("7", {"string", "integer"}, 7),
        ('"x"', {"string", "null"}, '"x"'),
        ('{"a": [1, "é"]}', {"object"}, {"a": [1, "é"]}),
        ("[1, 2]", {"array"}, [1, 2]),
        ("[1, 2]", {"object"}, "[1, 2]"),
        ("{'a': True}", {"object"}, {"a": True}),
        ("{'a': 1}", {"object", "string"}, "{'a': 1}"),
        ("['it\\'s', 1] so", {"array"}, "['it\\'s', 1] so"),
        ("['a', 1", {"array"}, "['a', 1"),
        ("['a'", {"object"}, "['a'"),
        ("NaN", {"number"}, "NaN"),
        ("[NaN]", {"array"}, ["NaN"]),
        ("1" * 5000, {"integer"}, "1" * 5000),
        ("[" * 100_000, {"array"}, "[" * 100_000),
    ],
)
def test_values_by_type(text: str, types: set[str], value: Any) -> None:
    found = json.loads(json_text(text, frozenset(types)))
    assert found == value
    assert type(found) is type(value)


SCHEMA: dict[str, Any] = {
    "properties": {
        "plain": {"type": "integer"},
        "several": {"type": ["string", "null", 3]},
        "either": {"anyOf": [{"type": "number"}, {"oneOf": [{"type": "null"}]}]},
        "listed": {"enum": [1, "a", None, True, 1.5, [], {}]},
        "referred": {"$ref": "#/$defs/Place"},
        "circular": {"$ref": "#/$defs/Loop"},
        "lost": {"$ref": "#/$defs/Nowhere"},
        "odd": 7,
        "odder": {"type": 7, "anyOf": 7, "$ref": 7},
    },
    "$defs": {"Place": {"type": "object"}, "Loop": {"$ref": "#/$defs/Loop"}},
}


@pytest.mark.parametrize(
    ("key", "types"),
    [
        ("plain", {"integer"}),
        ("several", {"string", "null"}),
        ("either", {"number", "null"}),
        ("listed", {"integer", "number", "string", "null", "boolean", "array", "object"}),
        ("referred", {"object"}),
        *((key, set()) for key in ("circular", "lost", "odd", "odder", "missing")),
    ],
)
def test_types_of_a_property(key: str, types: set[str]) -> None:
    assert json_types(SCHEMA, key) == types


@pytest.mark.parametrize("schema", [{}, {"properties": 3}, {"properties": {"city": None}}])
def test_schemas_that_say_nothing(schema: dict[str, Any]) -> None:
    parser = Qwen3CoderToolParser({"weather": schema})
    events = parser.push(call("weather", city="3"))
    assert calls_of(events) == [("weather", '{"city": "3"}')]


def test_schemas_that_lead_to_themselves_in_many_ways_end() -> None:
    names = [f"d{i}" for i in range(40)]
    definitions: dict[str, Any] = {
        name: {"anyOf": [{"$ref": f"#/$defs/{after}"}, {"$ref": f"#/$defs/{after}"}]}
        for name, after in pairwise([*names, "end"])
    }
    schema = {
        "properties": {"a": {"$ref": "#/$defs/d0"}},
        "$defs": definitions | {"end": {"type": "integer"}},
    }
    assert json_types(schema, "a") == {"integer"}
    wide = {"properties": {"a": {"anyOf": [{"type": "integer"}] * 100_000}}}
    assert json_types(wide, "a") == frozenset()  # too many to be looked at: anything
