"""Languages of outputs: what is asked for belongs to them, and what differs by a token does not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer
from support.checkpoints import tiny_tokenizer
from surestep_gateway.grammars.asked import content_language
from surestep_gateway.grammars.calls import Tools
from surestep_gateway.grammars.config import JsonStyle
from surestep_gateway.grammars.fields import StructuredBody
from surestep_gateway.grammars.language import Language
from surestep_gateway.grammars.reasoning import Format, Wanted, constraint
from surestep_gateway.parsers import REASONING_PARSERS
from surestep_gateway.text.tokenizer import Tokenizer

MARKERS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
HARMONY = ("<|channel|>", "<|message|>", "<|end|>", "<|start|>", "<|constrain|>", "<|call|>")
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city"],
    "additionalProperties": False,
}
OBJECT = Language("response_format", schema=CITY)


class Oracle:
    """A tokenizer with markers as special tokens, or without, and llguidance on it."""

    def __init__(self, folder: Path, *special: str) -> None:
        tiny_tokenizer.save(folder, *special)
        self.tokenizer = Tokenizer.load(folder)
        path = str(folder / "tokenizer.json")
        self._lark = LLTokenizer(path, eos_token=tiny_tokenizer.EOS_ID)

    def special(self, text: str) -> bool:
        """Whether a text is a special token."""
        found = self.tokenizer.id(text)
        return found is not None and self.tokenizer.is_special(found)

    def accepts(self, source: str, text: str) -> bool:
        """Whether a whole text belongs to a language."""
        matcher = LLMatcher(self._lark, source)
        assert not matcher.is_error(), matcher.get_error()
        ids = self.tokenizer.encode_now(text, add_special_tokens=False)
        return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()

    def written(
        self, prompt: str, reasoning: str | None = None, tools: str | None = None
    ) -> Format:
        """How a model writes behind a prompt."""
        parser = REASONING_PARSERS.get(reasoning)(prompt, {}) if reasoning else None
        return Format(reasoning, tools, parser, self.special)


@pytest.fixture(params=["special", "spelled"])
def oracle(request: pytest.FixtureRequest, tmp_path: Path) -> Oracle:
    return Oracle(tmp_path, *(MARKERS if request.param == "special" else ()))


@pytest.fixture
def plain(tmp_path: Path) -> Oracle:
    return Oracle(tmp_path)


def language(style: JsonStyle = JsonStyle(), **fields: Any) -> Language:  # noqa: B008
    """The language of these fields."""
    found = content_language(StructuredBody.model_validate(fields), style)
    assert found is not None
    return found


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
    "no more properties": (
        {
            "structured_outputs": {
                "json": {"type": "object", "properties": {"a": {"type": "integer"}}},
                "disable_additional_properties": True,
            }
        },
        ['{"a": 1}'],
        ['{"b": 1}'],
    ),
}


@pytest.mark.parametrize("name", ASKED)
def test_languages_of_fields(plain: Oracle, name: str) -> None:
    fields, inside, outside = ASKED[name]
    source = constraint(Wanted(language(**fields)), plain.written("")).source
    assert [text for text in inside if not plain.accepts(source, text)] == []
    assert [text for text in outside if plain.accepts(source, text)] == []


@pytest.mark.parametrize("text", ["b</think>c", "b\n</think>\n\nc"])
def test_reasoning_is_free(oracle: Oracle, text: str) -> None:
    """Behind a prompt that has begun it, before one that may, and not behind one that ended it."""
    wanted = Wanted(OBJECT)
    json_text = '{"city": "x"}'
    begun = constraint(wanted, oracle.written("<think>\n", "qwen3"))
    if oracle.special("</think>"):
        assert begun.begins_after == "</think>"
        assert oracle.accepts(begun.source, f"\n\n{json_text}")
        assert not oracle.accepts(begun.source, f"x{json_text}")
    else:
        assert begun.begins_after is None
        assert oracle.accepts(begun.source, f"{{so}}\n</think>\n\n{json_text}")
        assert not oracle.accepts(begun.source, json_text)
    may = constraint(wanted, oracle.written("assistant\n", "qwen3"))
    assert may.begins_after is None
    assert oracle.accepts(may.source, f"<think>\nwhy {{\n</think>\n\n{json_text}")
    assert oracle.accepts(may.source, json_text)
    assert not oracle.accepts(may.source, f"<think>why</think>{text}")
    ended = constraint(wanted, oracle.written("<think>\n\n</think>\n\n", "qwen3"))
    assert oracle.accepts(ended.source, json_text)
    assert not oracle.accepts(ended.source, f"<think>\n</think>{json_text}")


HERMES = '<tool_call>\n{{"name": "{}", "arguments": {}}}\n</tool_call>'
CODER = "<tool_call>\n<function={}>\n{}</function>\n</tool_call>"
CODER_CITY = "<parameter=city>\n{}\n</parameter>\n"
GOOD = {
    "hermes": HERMES.format("weather", '{"city": "Os\\"lo", "days": 2}'),
    "qwen3_coder": CODER.format(
        "weather", CODER_CITY.format('Os"lo\n<b>') + "<parameter=days>\n2\n</parameter>\n"
    ),
}
BAD = {
    "hermes": [
        HERMES.format("weather", "{}"),
        HERMES.format("other", '{"city": "x"}'),
        HERMES.format("weather", '{"city": "x", "more": 1}'),
    ],
    "qwen3_coder": [
        CODER.format("weather", ""),
        CODER.format("other", CODER_CITY.format("x")),
        CODER.format("weather", CODER_CITY.format("x") + "<parameter=days>\nx\n</parameter>\n"),
    ],
}


@pytest.mark.parametrize("tools", GOOD)
def test_required_calls(oracle: Oracle, tools: str) -> None:
    asked = Tools("tool_choice", {"weather": CITY}, required=True)
    written = oracle.written("", None, tools)
    source = constraint(Wanted(None, asked), written).source
    good = GOOD[tools]
    assert oracle.accepts(source, good)
    assert oracle.accepts(source, f"{good}\n{good}")
    assert [
        bad for bad in [*BAD[tools], "text", f"text {good}"] if oracle.accepts(source, bad)
    ] == []
    one = constraint(Wanted(None, asked._replace(parallel=False)), written).source
    assert oracle.accepts(one, good)
    assert not oracle.accepts(one, f"{good}\n{good}")


@pytest.mark.parametrize("tools", GOOD)
def test_strict_tools_among_free_text(oracle: Oracle, tools: str) -> None:
    asked = Tools("tools", {"weather": CITY, "book": None}, required=False)
    source = constraint(Wanted(None, asked), oracle.written("", None, tools)).source
    good = GOOD[tools]
    free = {
        "hermes": HERMES.format("book", '{"a": [1]}'),
        "qwen3_coder": CODER.format("book", "x\n"),
    }
    for text in ("no call", good, f"so:\n{good}\nand\n{free[tools]}", f"a < b {good}"):
        assert oracle.accepts(source, text), text
    assert [bad for bad in BAD[tools] if oracle.accepts(source, f"so {bad}")] == []


@pytest.mark.parametrize("tools", GOOD)
def test_an_object_or_calls(oracle: Oracle, tools: str) -> None:
    asked = Wanted(OBJECT, Tools("tools", {"weather": CITY}, required=False))
    source = constraint(asked, oracle.written("", None, tools)).source
    assert oracle.accepts(source, GOOD[tools])
    assert oracle.accepts(source, '{"city": "x"}')
    assert not oracle.accepts(source, "text")


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
    tools = Tools("tool_choice", {"f": schema}, required=True)
    source = constraint(Wanted(None, tools), plain.written("", None, "hermes")).source
    assert plain.accepts(source, HERMES.format("f", good))
    assert not plain.accepts(source, HERMES.format("f", bad))
