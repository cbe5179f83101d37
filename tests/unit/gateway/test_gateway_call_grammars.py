"""Languages of calls, in every format: what is forced is what the parser of the format reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from support.clients.grammar_oracle import CITY, Oracle
from support.clients.parser_cases import calls_of, contents_of, output_parser, parse
from surestep_gateway.grammars.calls import Tools
from surestep_gateway.grammars.config import JsonStyle
from surestep_gateway.grammars.language import Language
from surestep_gateway.grammars.reasoning import Wanted, constraint
from surestep_gateway.grammars.structured import served_schema
from surestep_gateway.parsers import TOOL_PARSERS

OBJECT = Language("response_format", schema=CITY)


@pytest.fixture(params=["special", "added", "spelled"])
def oracle(request: pytest.FixtureRequest, tmp_path: Path) -> Oracle:
    return Oracle.of_kind(tmp_path, request.param)


@pytest.fixture
def plain(tmp_path: Path) -> Oracle:
    return Oracle(tmp_path)


HERMES = '<tool_call>\n{{"name": "{}", "arguments": {}}}\n</tool_call>'
CODER = "<tool_call>\n<function={}>\n{}</function>\n</tool_call>"
CODER_CITY = "<parameter=city>\n{}\n</parameter>\n"
GLM45 = "<tool_call>{}\n{}</tool_call>"
GLM45_CITY = "<arg_key>city</arg_key>\n<arg_value>{}</arg_value>\n"
V3 = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{}\n```json\n{}\n```<｜tool▁call▁end｜>"
V31 = "<｜tool▁call▁begin｜>{}<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
SECTION = "<｜tool▁calls▁begin｜>{}<｜tool▁calls▁end｜>"
DSML = '<｜DSML｜invoke name="{}">\n{}</｜DSML｜invoke>'
DSML_CITY = '<｜DSML｜parameter name="city" string="true">{}</｜DSML｜parameter>\n'
M2 = '<invoke name="{}">\n{}</invoke>'
M2_CITY = '<parameter name="city">{}</parameter>\n'


class Written(NamedTuple):
    """How a format has calls: `call` takes a name and the arguments."""

    call: str
    city: str | None = None  # of arguments with tags, and of the other parameter
    days: str | None = None
    section: str = "{}"
    between: str = "\n"

    def one(self, name: str, city: str | None, days: str | None = None, more: str = "") -> str:
        """A call."""
        if self.city is None or self.days is None:
            parts = [f'"city": {json.dumps(city)}'] * (city is not None)
            parts += [f'"days": {days}'] * (days is not None)
            return self.call.format(
                name, "{" + ", ".join([*parts, *([more] if more else [])]) + "}"
            )
        values = [self.city.format(city)] * (city is not None)
        return self.call.format(name, "".join(values) + (self.days.format(days) if days else ""))

    def all(self, *calls: str) -> str:
        """What an output has of calls."""
        return self.section.format(self.between.join(calls))


LLAMA = '{{"name": "{}", "parameters": {}}}'
WRITTEN = {
    "hermes": Written(HERMES),
    "llama3_json": Written(LLAMA, between="; "),
    "qwen3_coder": Written(CODER, CODER_CITY, CODER_CITY.replace("city", "days")),
    "glm45": Written(GLM45, GLM45_CITY, GLM45_CITY.replace("city", "days")),
    "glm47": Written(
        GLM45.replace("\n", ""),
        GLM45_CITY.replace("\n", ""),
        GLM45_CITY.replace("\n", "").replace("city", "days"),
        between="",
    ),
    "deepseek_v3": Written(V3, section=SECTION),
    "deepseek_v31": Written(V31, section=SECTION, between=""),
    "deepseek_v32": Written(
        DSML,
        DSML_CITY,
        DSML_CITY.replace("city", "days").replace("true", "false"),
        "<｜DSML｜function_calls>\n{}\n</｜DSML｜function_calls>",
    ),
    "minimax_m2": Written(
        M2,
        M2_CITY,
        M2_CITY.replace("city", "days"),
        "<minimax:tool_call>\n{}\n</minimax:tool_call>",
    ),
}
GOOD = {tools: one.one("weather", 'Os"lo\n<b>', "2") for tools, one in WRITTEN.items()}
BAD = {
    tools: [
        one.one("weather", None),
        one.one("other", "x"),
        one.one("weather", "x", "x") if one.city else one.one("weather", "x", more='"more": 1'),
    ]
    for tools, one in WRITTEN.items()
}


@pytest.mark.parametrize("tools", GOOD)
def test_required_calls(oracle: Oracle, tools: str) -> None:
    asked = Tools("tool_choice", {"weather": CITY}, required=True)
    written = oracle.written("", None, tools)
    source = constraint(Wanted(None, asked), written).source
    every = WRITTEN[tools].all
    good, two = every(GOOD[tools]), every(GOOD[tools], GOOD[tools])
    assert oracle.accepts(source, good)
    assert oracle.accepts(source, two)
    outside = [*map(every, BAD[tools]), "text", f"text {good}"]
    assert [bad for bad in outside if oracle.accepts(source, bad)] == []
    one = constraint(Wanted(None, asked._replace(parallel=False)), written).source
    assert oracle.accepts(one, good)
    assert not oracle.accepts(one, two)
    called = parse(output_parser(tools), [two])
    assert [name for name, _ in calls_of(called)] == ["weather"] * 2
    found = [json.loads(arguments) for _, arguments in calls_of(called)]
    assert found == [{"city": 'Os"lo\n<b>', "days": 2}] * 2
    assert contents_of(called) == []


def test_strict_tools_without_markers(oracle: Oracle) -> None:
    """What begins as an object is a call; any other text is none, whatever is in it."""
    asked = Tools("tools", {"weather": CITY, "book": None}, required=False)
    source = constraint(Wanted(None, asked), oracle.written("", None, "llama3_json")).source
    good, book = GOOD["llama3_json"], LLAMA.format("book", '{"a": [1]}')
    for text in ("no call", "", " \n", good, f"{good}; {book}", f"so {BAD['llama3_json'][0]}"):
        assert oracle.accepts(source, text), text
    assert [bad for bad in [*BAD["llama3_json"], '{"a": 1}'] if oracle.accepts(source, bad)] == []


@pytest.mark.parametrize("tools", sorted(GOOD.keys() - {"llama3_json"}))
def test_strict_tools_among_free_text(oracle: Oracle, tools: str) -> None:
    asked = Tools("tools", {"weather": CITY, "book": None}, required=False)
    source = constraint(Wanted(None, asked), oracle.written("", None, tools)).source
    every = WRITTEN[tools].all
    good, free = every(GOOD[tools]), every(WRITTEN[tools].one("book", "x", "[1]"))
    for text in ("no call", good, f"so:\n{good}\nand\n{free}", f"a < b {good}"):
        assert oracle.accepts(source, text), text
    assert [bad for bad in BAD[tools] if oracle.accepts(source, f"so {every(bad)}")] == []


@pytest.mark.parametrize("tools", GOOD)
def test_an_object_or_calls(oracle: Oracle, tools: str) -> None:
    asked = Wanted(OBJECT, Tools("tools", {"weather": CITY}, required=False))
    source = constraint(asked, oracle.written("", None, tools)).source
    assert oracle.accepts(source, WRITTEN[tools].all(GOOD[tools]))
    assert oracle.accepts(source, '{"city": "x"}')
    assert not oracle.accepts(source, "text")


OPTIONAL = {
    "type": "object",
    "properties": {"city": {"anyOf": [{"type": "string"}, {"type": "null"}]}},
    "required": ["city"],
}


@pytest.mark.parametrize("tools", [tools for tools, one in WRITTEN.items() if one.city])
def test_values_that_may_be_strings_are_written_as_strings(plain: Oracle, tools: str) -> None:
    """Not as JSON with quotes, which parsers would take for a part of them."""
    asked = Tools("tool_choice", {"weather": OPTIONAL}, required=True)
    source = constraint(Wanted(None, asked), plain.written("", None, tools)).source
    written = WRITTEN[tools]
    assert plain.accepts(source, written.all(written.one("weather", "Oslo")))
    null = written.all(written.one("weather", "null")).replace('"true"', '"false"')
    assert plain.accepts(source, null)


@pytest.mark.parametrize("tools", ["glm45", "glm47"])
def test_calls_that_are_asked_for_do_not_begin_in_reasoning(oracle: Oracle, tools: str) -> None:
    asked = Tools("tool_choice", {"weather": CITY}, required=True)
    written = oracle.written("<think>\n", tools, tools)
    found = constraint(Wanted(None, asked), written)
    call = GOOD[tools]
    assert found.begins_after is None
    assert oracle.accepts(found.source, f"why</think>\n{call}")
    assert not oracle.accepts(found.source, f"why{call}")
    assert not oracle.accepts(found.source, f"why<tool_call></think>\n{call}")
    assert constraint(Wanted(OBJECT), written).begins_after == (
        "</think>" if oracle.tokenizer.is_marker("</think>") else None
    )


def test_definitions_are_found_from_within_calls(plain: Oracle) -> None:
    schema = {
        "type": "object",
        "properties": {"one": {"$ref": "#/$defs/one"}},
        "required": ["one"],
        "additionalProperties": False,
        "$defs": {"one": {"type": "integer"}},
    }
    for tools, good in (
        ("hermes", HERMES.format("f", '{"one": 1}')),
        ("qwen3_coder", CODER.format("f", "<parameter=one>\n1\n</parameter>\n")),
    ):
        asked = Wanted(None, Tools("tool_choice", {"f": schema}, required=True))
        source = constraint(asked, plain.written("", None, tools)).source
        assert plain.accepts(source, good)
        assert not plain.accepts(source, good.replace("1", '"x"'))


@pytest.mark.parametrize(
    "city",
    [
        {"enum": ["Oslo", 7]},
        {"const": "Oslo"},
        {"type": ["string", "integer"], "enum": ["Oslo", 7]},
        {"$ref": "#/$defs/City"},
        {"anyOf": [{"$ref": "#/$defs/City"}, {"type": "null"}]},
    ],
    ids=lambda city: "-".join(city),
)
@pytest.mark.parametrize("tools", [tools for tools, one in WRITTEN.items() if one.city])
def test_named_strings_are_read_as_they_were_meant(plain: Oracle, tools: str, city: Any) -> None:
    defs = {"City": {"enum": ["Oslo", "Rome"]}}
    schema = OPTIONAL | {"properties": {"city": city}, "$defs": defs}
    asked = Tools("tool_choice", {"weather": schema}, required=True)
    source = constraint(Wanted(None, asked), plain.written("", None, tools)).source
    written = WRITTEN[tools]
    good = written.all(written.one("weather", "Oslo"))
    assert plain.accepts(source, good)
    assert not plain.accepts(source, written.all(written.one("weather", '"Oslo"')))
    parser = TOOL_PARSERS.get(tools)({"weather": schema})
    assert parser is not None
    called = calls_of([*parser.push(good), *parser.finish()])
    assert [json.loads(arguments) for _, arguments in called] == [{"city": "Oslo"}]


OPEN = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TWO = {"allOf": [OPEN, {"type": "object", "properties": {"days": {"type": "integer"}}}]}
ONE_OF = {"anyOf": [OPEN, {"type": "object", "properties": {"id": {"type": "integer"}}}]}


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        (OPEN, '{"city": "x"}', '{"city": "x", "days": 1}'),
        (OPEN | {"additionalProperties": True}, '{"city": "x", "days": 1}', '{"days": 1}'),
        (TWO, '{"city": "x", "days": 1}', '{"city": 1}'),
        (ONE_OF, '{"id": 1}', '{"id": 1, "days": 2}'),
        (OPEN | {"anyOf": [OPEN, TWO]}, '{"city": "x", "days": 1}', "{}"),
    ],
)
def test_calls_have_no_arguments_but_those_that_are_named(
    plain: Oracle, schema: dict[str, Any], good: str, bad: str
) -> None:
    found = served_schema(schema, "tools", JsonStyle())
    assert not found.wider
    tools = Tools("tool_choice", {"f": found.schema}, required=True)
    source = constraint(Wanted(None, tools), plain.written("", None, "hermes")).source
    assert plain.accepts(source, HERMES.format("f", good))
    assert not plain.accepts(source, HERMES.format("f", bad))
