"""Schemas as libraries and servers write them: served, and their documents end with what was asked."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from llguidance import LLMatcher, LLTokenizer
from support.checkpoints import tiny_tokenizer
from support.clients.grammar_oracle import Oracle
from surestep_common.errors import InvalidRequest
from surestep_gateway.grammars.asked import content_language
from surestep_gateway.grammars.closing import closed
from surestep_gateway.grammars.config import JsonStyle, StructuredOutputsConfig
from surestep_gateway.grammars.fields import StructuredBody
from surestep_gateway.grammars.language import Language
from surestep_gateway.grammars.reasoning import Wanted, constraint
from surestep_gateway.grammars.violations import violations_of
from surestep_gateway.grammars.widening import reworded, widened, without_lengths
from surestep_worker.grammar.matcher import matcher_of, tokenizer_of

CORPUS = json.loads((Path(__file__).parents[2] / "data" / "schemas.json").read_text())
SCHEMAS: dict[str, dict[str, Any]] = {
    f"{one['source']}: {one['name']}": one["schema"] for one in CORPUS["schemas"]
}
_PLAIN = "Capital Person Customer MathReasoning Sentiment Paint Pet Described"
PLAIN = [f"1: {name}" for name in _PLAIN.split()]
STRICT = StructuredOutputsConfig(lenient=False).style()
LETTER = JsonStyle(additional_properties=True)


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    return Oracle(tmp_path_factory.mktemp("oracle"))


@pytest.fixture(scope="module")
def lark(tmp_path_factory: pytest.TempPathFactory) -> LLTokenizer:
    folder = tmp_path_factory.mktemp("lark")
    tiny_tokenizer.save(folder)
    size = Oracle(folder).tokenizer.size
    return tokenizer_of(folder / "tokenizer.json", size, [tiny_tokenizer.EOS_ID])


def language(schema: Any, style: JsonStyle = JsonStyle()) -> Language:  # noqa: B008
    body = StructuredBody.model_validate({"guided_json": schema})
    found = content_language(body, style, lambda _: "")
    assert found is not None
    return found


def source_of(oracle: Oracle, schema: Any, style: JsonStyle = JsonStyle()) -> str:  # noqa: B008
    return constraint(Wanted(language(schema, style)), oracle.written("")).source


def test_sources_are_named() -> None:
    assert {str(one["source"]) for one in CORPUS["schemas"]} == CORPUS["sources"].keys()
    assert len(SCHEMAS) == len(CORPUS["schemas"]) >= 112


def test_all_are_served(oracle: Oracle, subtests: pytest.Subtests) -> None:
    exact = 0
    for name, schema in SCHEMAS.items():
        with subtests.test(schema=name):
            began = time.process_time()
            oracle.compile(source_of(oracle, schema))
            assert time.process_time() - began < 5
            exact += language(schema).promised is None
    assert exact / len(SCHEMAS) > 0.85  # the others are checked when they are over


@pytest.mark.parametrize("name", PLAIN)
def test_documents_end_with_the_keys_that_were_asked(
    oracle: Oracle, lark: LLTokenizer, name: str
) -> None:
    """Whatever the model would rather write: tokens are drawn at random."""
    schema = SCHEMAS[name]
    matcher = matcher_of(lark, source_of(oracle, schema))
    for seed in range(5):
        document = drawn(matcher.deep_copy(), oracle, random.Random(seed))
        assert Draft202012Validator(schema).is_valid(document)
        assert set(schema["required"]) <= document.keys() <= set(schema["properties"])


@pytest.mark.rotates(1)
def test_what_is_written_is_what_was_asked(
    oracle: Oracle, lark: LLTokenizer, subtests: pytest.Subtests
) -> None:
    """All documents that are drawn validate, or the server would have told of them."""
    for name, schema in SCHEMAS.items():
        with subtests.test(schema=name):
            matcher = matcher_of(lark, source_of(oracle, schema))
            exact = language(schema).promised is None
            for seed in range(3):
                document = drawn(matcher.deep_copy(), oracle, random.Random(seed))
                found = violations_of(schema, json.dumps(document))
                assert not found or not exact
                assert not any("could not be checked" in one["message"] for one in found)


def test_by_the_letter_they_have_other_keys(oracle: Oracle, lark: LLTokenizer) -> None:
    matcher = matcher_of(lark, source_of(oracle, SCHEMAS[PLAIN[0]], LETTER))
    assert not matcher.deep_copy().is_error()
    found = {
        key for seed in range(20) for key in drawn(matcher.deep_copy(), oracle, random.Random(seed))
    }
    assert found - {"country", "city"}


def drawn(matcher: LLMatcher, oracle: Oracle, chance: random.Random) -> Any:
    """A document of tokens drawn at random, of which one in four ends something."""
    ids: list[int] = []
    texts = {
        id_: oracle.tokenizer.decode([id_], skip_special_tokens=False)
        for id_ in range(oracle.tokenizer.size)
    }
    while len(ids) < 4000:
        bias = matcher.compute_logit_bias()
        allowed = [id_ for id_ in texts if bias[id_]]
        if tiny_tokenizer.EOS_ID in allowed:
            break
        ends = [id_ for id_ in allowed if texts[id_] in ('"', "}", "]", ",", ":")]
        token = chance.choice(ends if ends and chance.random() < 0.25 else allowed)
        assert matcher.consume_token(token)
        ids.append(token)
    return json.loads(oracle.tokenizer.decode(ids, skip_special_tokens=False))


def test_bounds_of_draft_4() -> None:
    schema = {"type": "integer", "maximum": 5, "exclusiveMaximum": True, "exclusiveMinimum": False}
    assert violations_of(schema, "4") == []
    assert violations_of(schema, "5") != []
    older = schema | {"$schema": "http://json-schema.org/draft-04/schema#"}
    assert [bool(violations_of(older, text)) for text in ("4", "5")] == [False, True]


def of(*required: str, **properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(required)}


NUMBER, TEXT = {"type": "integer"}, {"type": "string"}
A_OR_B = {"enum": ["a", "b"]}


def keyed(names: Any) -> dict[str, Any]:
    return {"type": "object", "propertyNames": names, "additionalProperties": NUMBER}


def text(pattern: str) -> dict[str, Any]:
    return {"type": "string", "pattern": pattern}


# Schemas that llguidance has no words for, with what they allow, what they bar, and what they bar
# although the grammar allows it.
REWORDED: dict[str, tuple[Any, list[str], list[str], list[str]]] = {
    "unknown format": (TEXT | {"format": "color"}, ['"x"'], ["1"], []),
    "no format at all": (TEXT | {"format": "ends_with", "pattern": "z$"}, ['"az"'], ['"a"'], []),
    "names of a list": (keyed(A_OR_B), ['{"a": 1}', "{}"], ['{"c": 1}', '{"a": "x"}'], []),
    "names of a definition": (
        keyed({"$ref": "#/$defs/K"}) | {"$defs": {"K": A_OR_B}},
        ['{"a": 1, "b": 2}'],
        ['{"c": 1}'],
        [],
    ),
    "one name": (keyed({"const": "a"}), ['{"a": 1}'], ['{"b": 1}'], []),
    "names with a pattern": (keyed({"pattern": "^[A-Z]+$"}), ['{"AB": 1}'], ['{"a": 1}'], []),
    "names of a length": (
        keyed({"minLength": 2, "maxLength": 3}),
        ['{"ab": 1}'],
        ['{"a": 1}', '{"abcd": 1}'],
        [],
    ),
    "any names": (keyed(TEXT), ['{"x": 1}'], ['{"x": "y"}'], []),
    "names and properties": (
        of(a=NUMBER) | {"propertyNames": {"minLength": 1}, "additionalProperties": NUMBER},
        ['{"a": 1, "b": 1}'],
        ['{"a": "x"}'],
        ['{"": 1}'],
    ),
    "never": (of(a=NUMBER, b={"not": {}}), ['{"a": 1}'], ['{"b": 1}'], []),
    "not": (TEXT | {"not": {"enum": ["no"]}}, ['"yes"'], ["1"], ['"no"']),
    "not both": (
        of(a=NUMBER, b=NUMBER) | {"not": {"required": ["a", "b"]}},
        ['{"a": 1}'],
        ['{"a": "x"}'],
        ['{"a": 1, "b": 2}'],
    ),
    "dependentRequired": (
        of(a=NUMBER, b=NUMBER) | {"dependentRequired": {"a": ["b"]}},
        ['{"b": 1}', '{"a": 1, "b": 1}', "{}"],
        ['{"a": 1}'],
        [],
    ),
    "dependencies": (
        of(a=NUMBER, b=NUMBER)
        | {"$schema": "http://json-schema.org/draft-07/schema#", "dependencies": {"a": ["b"]}},
        ['{"b": 1}', '{"a": 1, "b": 1}'],
        ['{"a": 1}'],
        [],
    ),
    "dependentSchemas": (
        of(a=NUMBER) | {"dependentSchemas": {"a": of("b", b=NUMBER)}},
        ['{"a": 1, "b": 1}', "{}"],
        ['{"a": "x"}'],
        ['{"a": 1}'],
    ),
    "if": (
        of("k", k=A_OR_B, n=NUMBER, t=TEXT)
        | {"if": of(k={"const": "a"}), "then": {"required": ["n"]}, "else": {"required": ["t"]}},
        ['{"k": "a", "n": 1}', '{"k": "b", "t": "x"}'],
        ['{"k": "b"}', '{"k": "a"}', '{"k": "b", "n": 1}'],
        ['{"k": "a", "t": "x"}'],
    ),
    "if and then": (
        of(k=A_OR_B, n=NUMBER) | {"if": {"required": ["k"]}, "then": {"required": ["n"]}},
        ['{"k": "a", "n": 1}', "{}"],
        ['{"k": 1}'],
        ['{"k": "a"}'],
    ),
    "oneOf": (
        of(a=NUMBER, b=NUMBER) | {"oneOf": [{"required": ["a"]}, {"required": ["b"]}]},
        ['{"a": 1}', '{"b": 1}'],
        ["{}"],
        ['{"a": 1, "b": 1}'],
    ),
    "oneOf and anyOf": (
        {"oneOf": [{"type": "number"}, NUMBER], "anyOf": [{"minimum": 1}, {"maximum": -1}]},
        ["1.5"],
        ['"x"', "0.5"],
        ["2"],
    ),
    "a set": ({"type": "array", "items": NUMBER, "uniqueItems": True}, ["[1, 2]"], ['["x"]'], ["[1, 1]"]),
    "a set of a list": (
        {"type": "array", "items": A_OR_B, "uniqueItems": True},
        ['["a", "b"]'],
        ['["a", "b", "a"]'],
        ['["a", "a"]'],
    ),
    "contains": ({"type": "array", "items": NUMBER, "contains": {"const": 7}}, ["[7]"], ["7"], ["[1]"]),
    "some properties": (
        of(a=NUMBER, b=NUMBER) | {"minProperties": 1},
        ['{"a": 1}'],
        ['{"c": 1}', "{}"],
        [],
    ),
    "few properties": (
        of("a", a=NUMBER) | {"maxProperties": 2, "additionalProperties": TEXT, "minProperties": 2},
        ['{"a": 1, "b": "x"}'],
        ['{"a": "x"}'],
        [],
    ),
    "enough of many": (
        of(a=NUMBER, b=NUMBER) | {"minProperties": 2, "additionalProperties": NUMBER},
        ['{"a": 1, "b": 1}', '{"a": 1, "c": 1}'],
        ['{"a": "x"}'],
        ['{"a": 1}'],
    ),
    "enough with parts": (
        of("a", a=NUMBER) | {"minProperties": 2, "anyOf": [of(b=NUMBER, c=NUMBER)]},
        ['{"a": 1, "b": 1}', '{"a": 1, "b": 1, "c": 1}'],
        ['{"b": 1}', '{"a": 1}'],
        [],
    ),
    "lookahead": (text(r"^(?=.*[0-9])[a-z0-9]{2}$"), ['"a1"'], ['"A1"', '"a"'], ['"ab"']),
    "lookaheads inside": (text(r"^(?!(?:a|\)|[)])b)[ab]+(?<!b)$"), ['"ba"'], ['"c"'], ['"ab"']),
    "decimal": (text(r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"), ['"1.5"'], ['"x"'], ['"-"']),
    "ends": (text(r"\A[a-z]+\Z"), ['"ab"'], ['"a1"'], []),
    "reference": (text(r"^(['x])[a-z]\1$"), ["\"'a'\""], ["1"], ["\"'ax\""]),
    "lengths beside a pattern": (
        text(r"^(?:[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?\.)+[a-z0-9][a-z0-9-]{0,61}[a-z0-9]$")
        | {"maxLength": 100},
        ['"a.example"'],
        ['"a b"'],
        ['"%sexample"' % ("a." * 60)],
    ),
    "pattern of keys": (
        {"type": "object", "patternProperties": {"^(?!x)[a-z]+$": NUMBER}, "additionalProperties": False},
        ['{"a": 1}'],
        ['{"A": 1}', '{"a": "x"}'],
        ['{"x": 1}'],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REWORDED)
def test_the_nearest_language(oracle: Oracle, name: str) -> None:
    schema, inside, outside, told = REWORDED[name]
    source = source_of(oracle, schema)
    for document in inside:
        assert violations_of(schema, document) == []
        assert oracle.accepts(source, document), document
    assert [document for document in outside if oracle.accepts(source, document)] == []
    assert (language(schema).promised == schema) if told else True
    for document in told:
        assert violations_of(schema, document) != []
        assert oracle.accepts(source, document), document
    if language(schema).promised is None:
        language(schema, STRICT)
    else:
        with pytest.raises(InvalidRequest, match="guided_json"):
            language(schema, STRICT)


WRONG: list[tuple[Any, str]] = [
    (of(a=text("(?=a)(")), "guided_json.properties.a"),
    (of(a=text("(?=a")), "guided_json.properties.a"),
    (of(a={"type": "string", "uniqueItems": True}, b={"type": "x"}), "guided_json.properties.b"),
    (
        of(a={"not": {"type": "string"}, "$ref": "https://example.com/s"}),
        "guided_json.properties.a",
    ),
    ({"oneOf": 5}, "guided_json"),
    (keyed({"enum": 5}) | {"type": "x"}, "guided_json"),
    (
        {"uniqueItems": True, "patternProperties": {"(?=": {}}, "dependentRequired": 5},
        "guided_json",
    ),
]


@pytest.mark.parametrize(("schema", "place"), WRONG, ids=range(len(WRONG)))
def test_what_is_wrong_is_refused_all_the_same(schema: Any, place: str) -> None:
    with pytest.raises(InvalidRequest) as error:
        language(schema)
    assert error.value.param == place


DEEP: dict[str, Callable[[Any], Any]] = {
    "items": lambda one: {"type": "array", "items": one},
    "if": lambda one: {"if": one, "then": {}, "else": {}},
    "parts": lambda one: {"allOf": [one, {"uniqueItems": True}]},
    "properties": lambda one: of(a=one) | {"dependentRequired": {"a": ["b"]}},
}


@pytest.mark.parametrize("name", DEEP)
def test_deep_schemas_are_refused_at_once(name: str) -> None:
    schema: Any = {"type": "integer"}
    for _ in range(195 if name in ("items", "if") else 95):
        schema = DEEP[name](schema)
    began = time.process_time()
    with pytest.raises(InvalidRequest):
        language(schema)
    assert time.process_time() - began < 1


WIDE: dict[str, Any] = {
    "patterns": of(**{f"p{n}": text(f"^(?!x{n})[a-z]+$") for n in range(3000)}),
    "a pattern": text("(?=a)" * 20_000),
    "an open look": text("(?=" * 20_000),
    "conditions": {"allOf": [{"if": of(k=A_OR_B), "then": {}, "else": {}}] * 1000},
    "dependent": {"allOf": [of() | {"dependentRequired": {"a": ["b"] * 9}}] * 1000},
    "names": of(**{f"p{n}": keyed({"enum": [f"a{m}" for m in range(60)]}) for n in range(300)}),
}


@pytest.mark.parametrize("name", WIDE)
def test_large_schemas_are_reworded_in_little_time(name: str) -> None:
    began = time.process_time()
    shown = without_lengths(widened(closed(reworded(WIDE[name]))))
    assert time.process_time() - began < 3  # 0.3 on an idle machine; quadratic ones take minutes
    assert len(json.dumps(shown)) < 4 * len(json.dumps(WIDE[name])) + 1000


UNCHECKED: list[tuple[Any, str, str]] = [
    (text(r"\p{L}(?=a)"), '"a"', "bad escape"),
    ({"$ref": "https://example.com/schema"}, "1", "https://example.com/schema"),
    ({"$ref": "#"}, "1", "recursion"),
    ({"type": "array"}, "[" * 300, "recursion limit"),
    ({"type": "array"}, "[", "EOF"),
    ({"properties": 5}, "{}", "int"),
]


@pytest.mark.parametrize(("schema", "document", "told"), UNCHECKED, ids=range(len(UNCHECKED)))
def test_what_cannot_be_checked_is_told(schema: Any, document: str, told: str) -> None:
    (found,) = violations_of(schema, document)
    assert found["message"].startswith("it could not be checked: ")
    assert told in found["message"]


def test_violations_are_few_and_short() -> None:
    schema = {"type": "array", "items": {"const": "x" * 5000}}
    found = violations_of(schema, json.dumps(["y" * 5000] * 100))
    assert len(found) == 8
    assert found[3]["path"] == "$[3]"
    assert len(json.dumps(found)) < 8 * 700
