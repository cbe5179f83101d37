"""Every spelling of what an output must be, in every API: obeyed or refused by its name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from support.clients.grammar_oracle import CITY, Oracle
from support.processes.gateway_stack import Stack, StartStack

USER = [{"role": "user", "content": "x"}]
BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", {"messages": USER}),
    "completions": ("/v1/completions", {"prompt": "x"}),
    "responses": ("/v1/responses", {"input": "x"}),
    "messages": ("/v1/messages", {"messages": USER, "max_tokens": 9}),
}
ALL = tuple(BODIES)


class Spelling(NamedTuple):
    """Fields, a text that they allow, one that they do not, and the APIs that have them."""

    fields: dict[str, Any]
    inside: str
    outside: str
    apis: tuple[str, ...] = ALL


def city(fields: dict[str, Any], apis: tuple[str, ...] = ALL) -> Spelling:
    return Spelling(fields, '{"city": "x"}', '{"days": 1}', apis)


def a_object(fields: dict[str, Any], apis: tuple[str, ...] = ALL) -> Spelling:
    return Spelling(fields, '{"a": 1}', "[1]", apis)


def digits(fields: dict[str, Any], apis: tuple[str, ...] = ALL) -> Spelling:
    return Spelling(fields, "a12", "b12", apis)


def tagged(fields: dict[str, Any], apis: tuple[str, ...] = ALL) -> Spelling:
    return Spelling(fields, 'so <f=x>{"city": "a"}</f>', "so <f=x>{}</f>", apis)


TEXT = json.dumps(CITY)
NAMED = {"name": "n", "schema": CITY}
LARK, GBNF = 'start: "a" /[0-9]+/', 'root ::= "a" [0-9]+'
OLD_TAGS = {
    "structures": [{"begin": "<f=x>", "schema": CITY, "end": "</f>"}],
    "triggers": ["<f="],
}
CONTENT = {"type": "json_schema", "json_schema": CITY}
TAGS = {
    "format": {
        "type": "triggered_tags",
        "triggers": ["<f="],
        "tags": [{"type": "tag", "begin": "<f=x>", "content": CONTENT, "end": "</f>"}],
    }
}
FORMAT = {"type": "json_schema", "schema": CITY}
TAG_TYPE = {"type": "structural_tag"}
FORMATS = {
    "json_schema": city({"type": "json_schema", "json_schema": NAMED}),
    "json_schema, schema": city({"type": "json_schema", "schema": CITY}),
    "json_object": a_object({"type": "json_object"}),
    "json_object, schema": city({"type": "json_object", "schema": CITY}),
    "json_object, empty": a_object({"type": "json_object", "schema": {}}),
    "structures": tagged(TAG_TYPE | OLD_TAGS),
    "format": tagged(TAG_TYPE | TAGS),
}
STRUCTURED = {
    "json": city({"json": CITY}),
    "json, text": city({"json": TEXT}),
    "json, empty": Spelling({"json": {}}, "[1]", "x"),
    "json_object": a_object({"json_object": True}),
    "regex": digits({"regex": "a[0-9]+"}),
    "choice": digits({"choice": ["a12"]}),
    "grammar": digits({"grammar": LARK}),
    "structural_tag": tagged({"structural_tag": json.dumps(TAG_TYPE | TAGS)}),
    "structural_tag, object": tagged({"structural_tag": TAG_TYPE | TAGS}),
    "structural_tag, older": tagged({"structural_tag": json.dumps(TAG_TYPE | OLD_TAGS)}),
}
SPELLINGS: dict[str, Spelling] = {
    **{
        f"response_format: {name}": one._replace(fields={"response_format": one.fields})
        for name, one in FORMATS.items()
    },
    **{
        f"structured_outputs: {name}": one._replace(fields={"structured_outputs": one.fields})
        for name, one in STRUCTURED.items()
    },
    "guided_json": city({"guided_json": CITY}),
    "guided_json_object": a_object({"guided_json_object": True}),
    "guided_regex": digits({"guided_regex": "a[0-9]+"}),
    "guided_choice": digits({"guided_choice": ["a12"]}),
    "guided_grammar": digits({"guided_grammar": GBNF}),
    "structural_tag": tagged({"structural_tag": json.dumps(TAG_TYPE | OLD_TAGS)}),
    "structural_tag, current": tagged({"structural_tag": json.dumps(TAG_TYPE | TAGS)}),
    "json_schema, SGLang": city({"json_schema": TEXT}),
    "json_schema, llama.cpp": city({"json_schema": CITY}),
    "regex": digits({"regex": "a[0-9]+"}),
    "ebnf": digits({"ebnf": GBNF}),
    "grammar": digits({"grammar": GBNF}),
    "text.format": city({"text": {"format": {"type": "json_schema", **NAMED}}}, ("responses",)),
    "text.format, object": a_object({"text": {"format": {"type": "json_object"}}}, ("responses",)),
    "text.format, schema": city(
        {"text": {"format": {"type": "json_object", "schema": CITY}}}, ("responses",)
    ),
    "output_config": city({"output_config": {"format": FORMAT}}, ("messages",)),
    "output_format": city({"output_format": FORMAT}, ("messages",)),
}
# Refused in all APIs, and the name that says so.
NEVER: dict[str, tuple[dict[str, Any], str]] = {
    "Ollama's": ({"format": CITY}, "format"),
    "lazy": ({"grammar": GBNF, "grammar_lazy": True}, "grammar_lazy"),
    "triggers": ({"grammar_triggers": [{"value": "<"}]}, "grammar_triggers"),
    "two": ({"regex": "a", "ebnf": GBNF}, "ebnf"),
    "two schemas": ({"json_schema": CITY, "guided_json": CITY}, "json_schema"),
    "no choice": ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
    "unknown key": ({"structured_outputs": {"jsonschema": CITY}}, "structured_outputs.jsonschema"),
    "no tag": ({"structural_tag": '{"format": 5}'}, "structural_tag"),
    "tag of two forms": ({"structural_tag": json.dumps(OLD_TAGS | TAGS)}, "structural_tag.format"),
    "wrong": ({"ebnf": "root ::= ("}, "ebnf"),
}
WRONG_FORMATS: dict[str, tuple[dict[str, Any], str]] = {
    "no type": ({"schema": CITY}, "schema"),
    "text": ({"type": "text", "json_schema": NAMED}, "json_schema"),
    "TGI's": ({"type": "json_object", "value": CITY}, "value"),
    "named": ({"type": "json_object", "json_schema": NAMED}, "json_schema"),
    "unknown type": ({"type": "regex", "pattern": "a"}, "type"),
    "two schemas": ({"type": "json_schema", "json_schema": NAMED, "schema": CITY}, "schema"),
    "unknown key": (
        {"type": "json_schema", "json_schema": NAMED | {"shema": CITY}},
        "json_schema.shema",
    ),
}


@pytest.fixture
async def stack(start_stack: StartStack) -> Stack:
    return await start_stack()


@pytest.mark.rotates(3)
async def test_spellings(stack: Stack, tmp_path: Path, subtests: pytest.Subtests) -> None:
    oracle = Oracle(tmp_path)
    for name, spelling in SPELLINGS.items():
        for api, (path, body) in BODIES.items():
            with subtests.test(spelling=name, api=api):
                sent = len(stack.scheduler.requests)
                response = await stack.client.post(path, json=body | spelling.fields)
                if api not in spelling.apis:
                    refused(response, next(iter(spelling.fields)))
                    assert len(stack.scheduler.requests) == sent
                    continue
                assert response.status_code == 200, response.text
                source = stack.scheduler.requests[-1].sampling.grammar.source
                assert oracle.accepts(source, spelling.inside)
                assert not oracle.accepts(source, spelling.outside)


@pytest.mark.rotates(1)
async def test_what_is_not_obeyed_is_refused(stack: Stack, subtests: pytest.Subtests) -> None:
    wrong = {
        name: ({"response_format": fields}, f"response_format.{place}")
        for name, (fields, place) in WRONG_FORMATS.items()
    }
    for name, (fields, place) in (NEVER | wrong).items():
        for api in BODIES if name not in wrong else ("chat", "completions"):
            path, body = BODIES[api]
            with subtests.test(spelling=name, api=api):
                refused(await stack.client.post(path, json=body | fields), place)
    inner = FORMAT | {"value": CITY}
    path, body = BODIES["responses"]
    refused(await stack.client.post(path, json=body | {"text": {"format": inner}}), "text.format")
    path, body = BODIES["messages"]
    for fields in ({"output_format": inner}, {"output_config": {"format": inner}}):
        refused(await stack.client.post(path, json=body | fields), "output_config.format")
    both = {"response_format": {"type": "json_object"}, "output_format": FORMAT}
    refused(await stack.client.post(path, json=body | both), "response_format")
    assert stack.scheduler.requests == []


def refused(response: Any, place: str) -> None:
    """A 400 that names the field."""
    assert response.status_code == 400, response.text
    assert place in response.json()["error"]["message"]
