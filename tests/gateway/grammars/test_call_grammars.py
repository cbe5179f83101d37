"""Languages of calls, in every format: what is forced is what the parser of the format reads."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from support.clients.grammar_oracle import CITY, Oracle
from support.clients.parser_cases import calls_of, contents_of, output_parser, parse
from support.clients.written_calls import (
    BAD,
    CODER,
    GOOD,
    HERMES,
    KIMI,
    KIMI_SECTION,
    STEP,
    TOOLS,
    UNMARKED,
    WRITTEN,
)
from surestep_common.errors import InvalidRequest
from surestep_gateway.grammars.calls import Tools
from surestep_gateway.grammars.config import JsonStyle
from surestep_gateway.grammars.language import Language
from surestep_gateway.grammars.reasoning import Wanted, constraint
from surestep_gateway.grammars.structured import served_schema
from surestep_gateway.parsers import TOOL_PARSERS, content_of

OBJECT = Language("response_format", schema=CITY)


@pytest.fixture(params=["special", "added", "spelled"])
def oracle(request: pytest.FixtureRequest, tmp_path: Path) -> Oracle:
    return Oracle.of_kind(tmp_path, request.param)


@pytest.fixture
def plain(tmp_path: Path) -> Oracle:
    return Oracle(tmp_path)


def format_of(tools: str, oracle: Oracle) -> str:
    """The key of a format's texts. The tokenizer decides between Mistral's."""
    old = tools == "mistral" and not oracle.tokenizer.is_marker("[ARGS]")
    return "mistral, old" if old else tools


@pytest.mark.parametrize("tools", TOOLS)
def test_required_calls(oracle: Oracle, tools: str) -> None:
    form = format_of(tools, oracle)
    asked = Tools("tool_choice", {"weather": CITY}, required=True)
    written = oracle.written("", None, tools)
    source = constraint(Wanted(None, asked), written).source
    every = WRITTEN[form].all
    good, two = every(GOOD[form]), every(GOOD[form], GOOD[form])
    assert oracle.accepts(source, good)
    assert oracle.accepts(source, two)
    outside = [*map(every, BAD[form]), "text", f"text {good}"]
    assert [bad for bad in outside if oracle.accepts(source, bad)] == []
    one = constraint(Wanted(None, asked._replace(parallel=False)), written).source
    assert oracle.accepts(one, good)
    assert not oracle.accepts(one, two)
    called = parse(output_parser(tools), [two])
    assert [name for name, _ in calls_of(called)] == ["weather"] * 2
    found = [json.loads(arguments) for _, arguments in calls_of(called)]
    assert found == [{"city": 'Os"lo\n<b>', "days": 2}] * 2
    assert contents_of(called) == []


@pytest.mark.parametrize("tools", UNMARKED)
def test_strict_tools_without_markers(oracle: Oracle, tools: str) -> None:
    """Text that begins with the bracket is calls; any other text has none."""
    asked = Tools("tools", {"weather": CITY, "book": None}, required=False)
    source = constraint(Wanted(None, asked), oracle.written("", None, tools)).source
    form = WRITTEN[tools]
    good, book = GOOD[tools], form.one("book", "x", "1", more=True)
    for text in ("no call", "", " \n", form.all(good), form.all(good, book), "so [1] {'a': {}}"):
        assert oracle.accepts(source, text), text
    bad = [form.all(one) for one in BAD[tools][::2]]
    outside = [*bad, *(f"so {one}" for one in bad), form.section[:1].replace("{", '{"a": 1}')]
    outside += ["[TOOL_CALLS]weather[ARGS]{}", 'so {\n"type": "function"', "```json\n" + bad[0]]
    if tools == "pythonic":
        outside += ["weather()", "<|python_start|>weather()"]
    for text in outside:
        assert not oracle.accepts(source, text) or not calls_of(
            parse(output_parser(tools), [text])
        ), text


@pytest.mark.parametrize("tools", sorted(set(TOOLS) - set(UNMARKED)))
def test_strict_tools_among_free_text(oracle: Oracle, tools: str) -> None:
    form = format_of(tools, oracle)
    asked = Tools("tools", {"weather": CITY, "book": None}, required=False)
    source = constraint(Wanted(None, asked), oracle.written("", None, tools)).source
    every = WRITTEN[form].all
    good, free = every(GOOD[form]), every(WRITTEN[form].one("book", "x", "[1]"))
    for text in ("no call", good, f"so:\n{good}\nand\n{free}", f"a < b {good}"):
        assert oracle.accepts(source, text), text
    assert [bad for bad in BAD[form] if oracle.accepts(source, f"so {every(bad)}")] == []


OTHERWISE = {  # how calls begin that are no more in their format
    "qwen3_coder": "<function=weather>\n</function>",
    "seed_oss": "<function=weather>\n</function>",
    "olmo3": "[weather()]",
    "granite": '<tool_call> [{"name": "weather", "arguments": {}}]',
    "phi4_mini_json": 'functools [{"name": "weather", "arguments": {}}]',
    "granite-20b-fc": '<function_call>{"name": "weather", "arguments": {}}',
    "kimi_k2": KIMI.format("weather", "{}"),
    "minimax_m2": '<invoke name="weather">\n</invoke>',
    "deepseek_v32": '<｜DSML｜invoke name="weather">\n</｜DSML｜invoke>',
    "step3": STEP.format("weather", ""),
    "deepseek_v3": "<｜tool▁call▁begin｜>weather<｜tool▁sep｜>{}<｜tool▁call▁end｜>",
    "deepseek_v31": "<｜tool▁call▁begin｜>weather<｜tool▁sep｜>{}<｜tool▁call▁end｜>",
    "mistral": '[{"name": "weather", "arguments": {}}]',
}


@pytest.mark.parametrize("tools", OTHERWISE)
def test_strict_tools_are_not_called_otherwise(oracle: Oracle, tools: str) -> None:
    """Parsers read it, so that strict functions must not be called so."""
    asked = Tools("tools", {"weather": CITY}, required=False)
    source = constraint(Wanted(None, asked), oracle.written("", None, tools)).source
    text = OTHERWISE[tools]
    assert calls_of(parse(output_parser(tools), [text])) == [("weather", "{}")]
    assert not oracle.accepts(source, text)
    assert not oracle.accepts(source, f"so {text}")


CUT = {  # values in which parsers see their end
    "qwen3_coder": ["a\n<parameter=days>\nx", "a</function>\n</tool_call>"],
    "seed_oss": ["a\n<parameter=days>x", "a</function>\n</seed:tool_call>"],
    "glm47": ["a<arg_key>days</arg_key>x", "a</tool_call><tool_call>"],
    "step3": ['a<steptml:parameter name="days">x', "a<｜tool_call_end｜><｜tool_calls_end｜>"],
    "minimax_m2": ['a<parameter name="days">x', "a</invoke></minimax:tool_call>"],
    "deepseek_v32": ['a<｜DSML｜parameter name="days">x', "a</｜DSML｜invoke><｜DSML｜invoke"],
}


@pytest.mark.parametrize("tools", CUT)
def test_values_end_where_parsers_see_their_end(plain: Oracle, tools: str) -> None:
    asked = Tools("tool_choice", {"weather": CITY}, required=True)
    source = constraint(Wanted(None, asked), plain.written("", None, tools)).source
    form = WRITTEN[tools]
    for value in CUT[tools]:
        assert not plain.accepts(source, form.all(form.one("weather", value, "2"))), value


@pytest.mark.parametrize("required", [[], ["a"], ["b"], ["a", "b", "c"]])
def test_arguments_in_python(plain: Oracle, required: list[str]) -> None:
    """Commas are between those that there are."""
    properties = {"a": {"type": "boolean"}, "b": {"type": "string"}, "c": {"type": "array"}}
    schema = {"type": "object", "properties": properties, "required": required}
    asked = Tools("tool_choice", {"f": schema}, required=True)
    source = constraint(Wanted(None, asked), plain.written("", None, "pythonic")).source
    values = {"a": "True", "b": '"é \\"x\\n"', "c": '["]", {"d": null}]'}
    for chosen in product((False, True), repeat=3):
        given = {key: values[key] for key, one in zip(values, chosen, strict=True) if one}
        text = f"[f({', '.join(f'{key}={value}' for key, value in given.items())})]"
        assert plain.accepts(source, text) == set(required).issubset(given), text
        parser = TOOL_PARSERS.get("pythonic")({"f": schema})
        assert parser is not None
        (called,) = calls_of([*parser.push(text), *parser.finish()])
        read = {"a": True, "b": 'é "x\n', "c": ["]", {"d": None}]}
        assert json.loads(called[1]) == {key: read[key] for key in given}


def test_a_key_that_python_cannot_write_is_refused(plain: Oracle) -> None:
    schema = {"type": "object", "properties": {"a b": {}}}
    asked = Tools("tool_choice", {"f": schema}, required=True)
    with pytest.raises(InvalidRequest, match="'a b'"):
        constraint(Wanted(None, asked), plain.written("", None, "pythonic"))


@pytest.mark.parametrize("tools", TOOLS)
def test_an_object_or_calls(oracle: Oracle, tools: str) -> None:
    form = format_of(tools, oracle)
    asked = Wanted(OBJECT, Tools("tools", {"weather": CITY}, required=False))
    source = constraint(asked, oracle.written("", None, tools)).source
    assert oracle.accepts(source, WRITTEN[form].all(GOOD[form]))
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


def test_reasoning_may_begin_with_its_marker(oracle: Oracle) -> None:
    """Kimi writes it, or leaves it out. A call is none before the reasoning ends."""
    asked = Tools("tool_choice", {"weather": CITY}, required=True)
    written = oracle.written("", "kimi_k2", "kimi_k2")
    source = constraint(Wanted(None, asked), written).source
    call = KIMI_SECTION.format(GOOD["kimi_k2"])
    for thought in ("<think>why</think>", "why</think>\n", "<think></think>"):
        assert oracle.accepts(source, thought + call), thought
    assert not oracle.accepts(source, f"why{call}")
    assert not oracle.accepts(source, f"{KIMI_SECTION[:28]}</think>{call}")


@pytest.mark.parametrize(
    ("prompt", "thought"), [("<think>\n", "why\n</think>\n"), ("<think>\n\n</think>\n", "")]
)
def test_what_is_asked_for_may_stand_between_tags(
    oracle: Oracle, prompt: str, thought: str
) -> None:
    name = "hunyuan_a13b"
    call = WRITTEN[name].all(GOOD[name])
    calls = Tools("tool_choice", {"weather": CITY}, required=True)
    for wanted, good, bad in (
        (Wanted(None, calls), call, "text"),
        (Wanted(OBJECT), '{"city": "x"}', "text"),
        (Wanted(None, calls._replace(required=False)), f"so {call}", f"so {call[:-28]}"),
    ):
        found = constraint(wanted, oracle.written(prompt, name, name))
        lead = "" if found.begins_after else thought
        for tags in ("{}", "<answer>\n{}\n</answer>", "<answer>{}"):
            assert oracle.accepts(found.source, lead + tags.format(good)), tags
            assert not oracle.accepts(found.source, lead + tags.format(bad)), tags
            parser = output_parser(name, reasoning=name, prompt=prompt)
            read = parse(parser, [thought + tags.format(good)])
            assert content_of(read).strip() == good.replace(call, "").strip()


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
