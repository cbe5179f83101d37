"""Languages of outputs: what is asked for belongs to them, and what differs by a token does not."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from support.clients.grammar_oracle import CITY, Oracle
from surestep_gateway.grammars.asked import content_language
from surestep_gateway.grammars.calls import Tools
from surestep_gateway.grammars.closing import closed
from surestep_gateway.grammars.config import JsonStyle, StructuredOutputsConfig
from surestep_gateway.grammars.fields import StructuredBody
from surestep_gateway.grammars.language import Language
from surestep_gateway.grammars.reasoning import Wanted, constraint

HARMONY = ("<|channel|>", "<|message|>", "<|end|>", "<|start|>", "<|constrain|>", "<|call|>")
OPEN = "disable_additional_properties"
OBJECT = Language("response_format", schema=CITY)


@pytest.fixture(params=["special", "added", "spelled"])
def oracle(request: pytest.FixtureRequest, tmp_path: Path) -> Oracle:
    return Oracle.of_kind(tmp_path, request.param)


@pytest.fixture
def plain(tmp_path: Path) -> Oracle:
    return Oracle(tmp_path)


def language(style: JsonStyle = JsonStyle(), **fields: Any) -> Language:  # noqa: B008
    """The language of these fields."""
    found = content_language(StructuredBody.model_validate(fields), style, lambda text: "")
    assert found is not None
    return found


def of(**properties: Any) -> dict[str, Any]:
    """The schema of an object that does not say whether it may have more properties."""
    return {"type": "object", "properties": properties}


NUMBER = {"type": "integer"}
PARTS = {"A": of(a=NUMBER), "B": of(b={"$ref": "#/$defs/A"})}
EITHER = [{"$ref": "#/$defs/A"}, {"$ref": "#/$defs/B"}]
ASKED: dict[str, tuple[dict[str, Any], list[str], list[str]]] = {
    "json_object": (
        {"response_format": {"type": "json_object"}},
        ['{"a": [1]}', "{}"],
        ["[1]", "a", '{"a": 1'],
    ),
    "json_schema": (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": CITY}}},
        ['{"city": "Oslo"}', '{ "city":"é", "days": 2 }'],
        ['{"days": 2}', '{"city": 1}', '{"city": "a", "b": 1}'],
    ),
    "json as text": ({"structured_outputs": {"json": json.dumps(CITY)}}, ['{"city": "x"}'], ["{}"]),
    "regex": ({"structured_outputs": {"regex": "a/b+|c"}}, ["a/bb", "c"], ["a", "a/b "]),
    "choice": ({"structured_outputs": {"choice": ["yes", 'n"o']}}, ["yes", 'n"o'], ["no", "y"]),
    "lark": ({"structured_outputs": {"grammar": 'start: "a" b\nb: /[0-9]+/'}}, ["a12"], ["a"]),
    "gbnf": ({"structured_outputs": {"grammar": 'root ::= "a" [0-9]+'}}, ["a12"], ["a"]),
    "tags": (
        {
            "response_format": {
                "type": "structural_tag",
                "structures": [{"begin": "<f=x>", "schema": CITY, "end": "</f>"}],
                "triggers": ["<f="],
            }
        },
        ["text", 'so <f=x>{"city": "a"}</f> then'],
        ["<f=x>{}</f>", "<f=y>"],
    ),
    "guided_json": ({"guided_json": CITY}, ['{"city": "x"}'], ["{}"]),
    "guided_regex": ({"guided_regex": "[ab]+"}, ["ab"], ["c"]),
    "guided_choice": ({"guided_choice": ["a"]}, ["a"], ["b"]),
    "guided_grammar": ({"guided_grammar": 'start: "a"'}, ["a"], ["b"]),
    "no whitespace": (
        {"structured_outputs": {"json": CITY, "disable_any_whitespace": True}},
        ['{"city":"x"}'],
        ['{"city": "x"}'],
    ),
    "whitespace": (
        {"structured_outputs": {"json": CITY, "whitespace_pattern": " ?"}},
        ['{ "city": "x" }'],
        ['{  "city": "x"}'],
    ),
    "white space ends": (
        {"structured_outputs": {"json": CITY}},
        ['{"city":%s"x"}' % (" \t\n\r" * 8)],
        ['{"city":%s"x"}' % (" " * 33)],
    ),
    "closed": (
        {"guided_json": of(a=of(enum=of(properties=NUMBER)))},
        ['{"a": {"enum": {"properties": 1}}}', "{}"],
        ['{"b": 1}', '{"a": {"b": 1}}', '{"a": {"enum": {"additionalProperties": false}}}'],
    ),
    "closed, required and not described": (
        {"guided_json": of(a=NUMBER) | {"required": ["b"]}},
        ['{"a": 1, "b": "x"}', '{"b": 1}'],
        ['{"a": 1}', '{"b": 1, "c": 1}'],
    ),
    "closed, one of two": (
        {"guided_json": {"$defs": PARTS, "anyOf": EITHER}},
        ['{"a": 1}', '{"b": {"a": 1}}'],
        ['{"a": 1, "b": {}}', '{"b": {"b": 1}}', '{"c": 1}'],
    ),
    "closed, both of two": (
        {"guided_json": {"$defs": PARTS, "allOf": EITHER}},
        ['{"a": 1, "b": {"a": 1}}', "{}"],
        ['{"c": 1}', '{"b": {"b": 1}}', '{"a": "x"}'],
    ),
    "closed, with parts": (
        {"guided_json": of(a=NUMBER) | {"anyOf": [of(b=NUMBER), {"required": ["a"]}]}},
        ['{"a": 1, "b": 2}', '{"b": 2}'],
        ['{"c": 1}', '{"b": "x"}'],
    ),
    "closed, of itself": (
        {
            "guided_json": {
                "$defs": {"N": of(n={"$ref": "#/$defs/N"})},
                "allOf": [{"$ref": "#/$defs/N"}],
            }
        },
        ['{"n": {"n": {}}}'],
        ['{"n": {"m": {}}}'],
    ),
    "open where it says so": (
        {"guided_json": of(a=NUMBER) | {"additionalProperties": NUMBER}},
        ['{"a": 1, "b": 2}'],
        ['{"b": "x"}'],
    ),
    "open without names": ({"guided_json": {"type": "object"}}, ['{"a": {"b": 1}}'], ["[]"]),
    "open to have enough": (
        {"guided_json": of() | {"minProperties": 1}},
        ['{"a": 1}'],
        ["{}"],
    ),
    "the letter of JSON Schema": (
        {
            "guided_json": of(a=NUMBER),
            "structured_outputs": {"disable_additional_properties": False},
        },
        ['{"a": 1, "b": 2}', '{"b": "x"}'],
        ['{"a": "x"}'],
    ),
}


@pytest.mark.parametrize("name", ASKED)
def test_languages_of_fields(plain: Oracle, name: str) -> None:
    fields, inside, outside = ASKED[name]
    source = constraint(Wanted(language(**fields)), plain.written("")).source
    assert [text for text in inside if not plain.accepts(source, text)] == []
    assert [text for text in outside if plain.accepts(source, text)] == []


@pytest.mark.parametrize(
    ("settings", "is_closed"), [({}, True), ({OPEN: True}, True), ({OPEN: False}, False)]
)
def test_the_server_says_which_objects_are_closed(
    plain: Oracle, settings: Any, is_closed: bool
) -> None:
    style = StructuredOutputsConfig.model_validate(settings).style()
    for asked, expected in ((None, is_closed), (True, True), (False, False)):
        found = language(style, structured_outputs={"json": of(a=NUMBER), OPEN: asked})
        source = constraint(Wanted(found), plain.written("")).source
        assert plain.accepts(source, '{"b": 1}') == (not expected)


PARTED = {"$defs": {f"D{n}": of(**{f"k{n}": NUMBER}) for n in range(400)}} | of(
    **{f"p{n}": {"allOf": [{"$ref": f"#/$defs/D{m}"} for m in range(400)]} for n in range(40)}
)


@pytest.mark.parametrize(
    "schema", [PARTED, {"allOf": 5}, {"properties": [], "required": 5}], ids=range(3)
)
def test_closing_any_schema_takes_little(schema: Any) -> None:
    before = time.process_time()
    shown = closed(schema)
    assert time.process_time() - before < 1
    assert len(json.dumps(shown)) < 2 * len(json.dumps(schema)) + 1_000_000


def tag(content: Any, begin: str = "<f>", end: Any = "</f>") -> dict[str, Any]:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def const(value: str) -> dict[str, Any]:
    return {"type": "const_string", "value": value}


ANY, DIGIT = {"type": "any_text"}, {"type": "regex", "pattern": "[0-9]/"}
TRIGGERED = {"type": "triggered_tags", "triggers": ["<f"], "tags": [tag(DIGIT), tag(ANY, "<fg>")]}
SEPARATED = {"type": "tags_with_separator", "separator": ", ", "tags": [tag(DIGIT)]}
TAGS: dict[str, tuple[dict[str, Any], list[str], list[str]]] = {
    "const_string": (const('a"'), ['a"'], ["", "a"]),
    "any_text": (ANY, ["", "<f>"], []),
    "json_schema": ({"type": "json_schema", "json_schema": CITY}, ['{"city": "x"}'], ["{}"]),
    "any json": ({"type": "json_schema", "json_schema": True}, ["[1]"], ["x"]),
    "regex": (DIGIT, ["1/"], ["1", "a/"]),
    "grammar": ({"type": "grammar", "grammar": 'root ::= "a" [0-9]'}, ["a1"], ["a"]),
    "sequence": (
        {"type": "sequence", "elements": [const("a"), DIGIT, ANY]},
        ["a1/", "a1/b"],
        ["a"],
    ),
    "or": ({"type": "or", "elements": [const("a"), tag(ANY)]}, ["a", "<f>b</f>"], ["b", "<f>"]),
    "tag": (tag(ANY), ["<f></f>", "<f>a<f></f>"], ["<f>a", "<f>a</f>b</f>"]),
    "ends": (tag(DIGIT, end=["!", "?"]), ["<f>1/!", "<f>1/?"], ["<f>1/"]),
    "no end": (tag(DIGIT, end=""), ["<f>1/"], ["<f>1/</f>"]),
    "inner": (tag(tag(ANY, "(", ")")), ["<f>(a)</f>"], ["<f>(a</f>", "<f>(a)b</f>"]),
    "triggered_tags": (TRIGGERED, ["", "a<f>1/</f>b<fg>x</f>", "<"], ["<f>a</f>", "a<f"]),
    "at_least_one": (
        TRIGGERED | {"at_least_one": True},
        ["<f>1/</f>", "<fg></f>a<f>1/</f>b"],
        ["", "a<f>1/</f>"],
    ),
    "stop_after_first": (
        TRIGGERED | {"stop_after_first": True},
        ["a", "a<f>1/</f>"],
        ["<f>1/</f>b", "<f>1/</f><f>1/</f>"],
    ),
    "exactly one": (
        TRIGGERED | {"stop_after_first": True, "at_least_one": True},
        ["<f>1/</f>"],
        ["", "a", "<f>1/</f><f>1/</f>"],
    ),
    "tags_with_separator": (
        SEPARATED,
        ["", "<f>1/</f>", "<f>1/</f>, <f>2/</f>"],
        ["<f>1/</f>, ", "a", "<f>1/</f><f>2/</f>"],
    ),
    "some": (SEPARATED | {"at_least_one": True}, ["<f>1/</f>"], [""]),
    "one": (
        SEPARATED | {"stop_after_first": True},
        ["", "<f>1/</f>"],
        ["<f>1/</f>, <f>2/</f>"],
    ),
    "optional": ({"type": "optional", "content": const("a")}, ["", "a"], ["aa"]),
    "star": ({"type": "star", "content": const("a")}, ["", "aaa"], ["b"]),
    "plus": ({"type": "plus", "content": const("a")}, ["a", "aaa"], [""]),
}


@pytest.mark.parametrize("name", TAGS)
def test_structural_tags(plain: Oracle, name: str) -> None:
    asked, inside, outside = TAGS[name]
    found = language(response_format={"type": "structural_tag", "format": asked})
    source = constraint(Wanted(found), plain.written("")).source
    assert [text for text in inside if not plain.accepts(source, text)] == []
    assert [text for text in outside if plain.accepts(source, text)] == []


def test_free_text_ends_at_a_marker_that_is_a_token(oracle: Oracle) -> None:
    think = tag(ANY, "<think>", "\n</think>\n\n")
    asked = {"type": "sequence", "elements": [think, const("a")]}
    kind = {"response_format": {"type": "structural_tag", "format": asked}}
    found = content_language(
        StructuredBody.model_validate(kind), JsonStyle(), oracle.tokenizer.in_grammars
    )
    assert found is not None
    source = constraint(Wanted(found), oracle.written("")).source
    assert oracle.accepts(source, "<think>so\n\nso\n</think>\n\na")
    assert not oracle.accepts(source, "<think>so\n</think>\n\nb")


@pytest.mark.parametrize("trigger", ["<tool_call>", '<tool_call>{"name"'])
def test_structural_tags_are_tokens_where_the_tokenizer_has_them(
    oracle: Oracle, trigger: str
) -> None:
    begin, end = '<tool_call>{"name": "weather", "arguments": ', "}</tool_call>"
    structure = {"begin": begin, "schema": CITY, "end": end}
    tags = {"type": "structural_tag", "structures": [structure], "triggers": [trigger]}
    asked = StructuredBody.model_validate({"response_format": tags})
    found = content_language(asked, JsonStyle(), oracle.tokenizer.in_grammars)
    assert found is not None
    source = constraint(Wanted(found), oracle.written("")).source
    good, bad = f'{begin}{{"city": "a"}}{end}', f"{begin}{{}}{end}"
    for text in ("no call", good, f"so {good}\nand {good} then"):
        assert oracle.accepts(source, text), text
    assert not oracle.accepts(source, bad)
    assert not oracle.accepts(source, f"so {good} {bad}")


CHOICES = {
    "numbered": [f"entry number {n}" for n in range(4096)],
    "long": [f"{n:05}" * 10 for n in range(4000)],
    "prefixes": ["x" * n for n in range(1, 600)],
    "prefixed": ["yes", "yesterday", "ye"],
    "odd": ["/", "\\", '"', "\n", " ", "é", "<think>"],
}


@pytest.mark.parametrize("name", CHOICES)
def test_all_choices_that_are_admitted_are_compiled_as_ranks_do(plain: Oracle, name: str) -> None:
    texts = CHOICES[name]
    wanted = Wanted(language(structured_outputs={"choice": texts}))
    for source in (
        constraint(wanted, plain.written("")).source,
        constraint(wanted, plain.written("<think>\n", "qwen3")).source,
    ):
        plain.compile(source)
    source = constraint(wanted, plain.written("")).source
    assert [text for text in (texts[0], texts[-1]) if not plain.accepts(source, text)] == []
    assert not plain.accepts(source, texts[-1] + "?")


@pytest.mark.parametrize("text", ["b</think>c", "b\n</think>\n\nc"])
def test_reasoning_is_free(oracle: Oracle, text: str) -> None:
    """Behind a prompt that has begun it, before one that may, and not behind one that ended it."""
    wanted = Wanted(OBJECT)
    json_text = '{"city": "x"}'
    begun = constraint(wanted, oracle.written("<think>\n", "qwen3"))
    if oracle.tokenizer.is_marker("</think>"):
        assert begun.begins_after == "</think>"
        assert oracle.accepts(begun.source, f"\n\n{json_text}")
        assert not oracle.accepts(begun.source, f"x{json_text}")
    else:
        assert begun.begins_after is None
        assert oracle.accepts(begun.source, f"{{so}}\n</think>\n\n{json_text}")
        assert not oracle.accepts(begun.source, json_text)
    may = constraint(wanted, oracle.written("assistant\n", "qwen3"))
    assert may.begins_after is None
    thought = f"<think>\nwhy {{\n</think>\n\n{json_text}"
    assert oracle.accepts(may.source, thought) == oracle.tokenizer.is_marker("<think>")
    assert oracle.accepts(may.source, json_text)
    assert not oracle.accepts(may.source, f"<think>why</think>{text}")
    ended = constraint(wanted, oracle.written("<think>\n\n</think>\n\n", "qwen3"))
    assert oracle.accepts(ended.source, json_text)
    assert not oracle.accepts(ended.source, f"<think>\n</think>{json_text}")


def test_reasoning_in_brackets_is_free(plain: Oracle) -> None:
    """Mistral's markers, which are text to this tokenizer and no classes of characters."""
    source = constraint(Wanted(OBJECT), plain.written("[THINK]\n", "mistral")).source
    assert plain.accepts(source, '[THINK] so]\n[/THINK]\n\n{"city": "x"}')
    assert not plain.accepts(source, 'so]{"city": "x"}')


ANALYSIS = "<|channel|>analysis<|message|>why {<|end|><|start|>assistant"
FINAL = "<|channel|>final<|message|>"
CALL = "<|channel|>commentary to=functions.weather <|constrain|>json<|message|>"


def test_harmony(tmp_path: Path) -> None:
    oracle = Oracle(tmp_path, *HARMONY)
    written = oracle.written("<|start|>assistant", "openai_gptoss", "openai")
    object_ = constraint(Wanted(OBJECT), written).source
    tools = Tools("tool_choice", {"weather": CITY}, required=True)
    called = constraint(Wanted(None, tools), written).source
    strict = constraint(Wanted(None, tools._replace(required=False)), written).source
    both = constraint(Wanted(OBJECT, tools._replace(required=False)), written).source
    good = '{"city": "x"}'
    for lead in ("", ANALYSIS, ANALYSIS * 2):
        assert oracle.accepts(object_, f"{lead}{FINAL}{good}")
        assert not oracle.accepts(object_, f"{lead}{FINAL}text")
        assert not oracle.accepts(object_, f"{lead}{CALL}{good}")
        assert oracle.accepts(called, f"{lead}{CALL}{good}")
        assert not oracle.accepts(called, f"{lead}{CALL}{{}}")
        assert not oracle.accepts(called, f"{lead}{FINAL}text")
        assert oracle.accepts(strict, f"{lead}{FINAL}any text")
        assert oracle.accepts(strict, f"{lead}{CALL}{good}")
        assert not oracle.accepts(strict, f"{lead}{CALL}{{}}")
        assert oracle.accepts(both, f"{lead}{FINAL}{good}")
        assert oracle.accepts(both, f"{lead}{CALL}{good}")
        assert not oracle.accepts(both, f"{lead}{FINAL}text")
