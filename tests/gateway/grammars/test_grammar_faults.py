"""Faults of what requests ask of outputs: named with their place, and before anything runs."""

from __future__ import annotations

from typing import Any

import pytest
from surestep_common.errors import InvalidRequest, UnsupportedParameter
from surestep_gateway.grammars.asked import content_language
from surestep_gateway.grammars.config import JsonStyle
from surestep_gateway.grammars.fields import StructuredBody
from surestep_gateway.grammars.language import Language
from surestep_gateway.grammars.reasoning import Format, Wanted, constraint

PLAIN = Format(None, None, None, lambda _: "")


def language(**fields: Any) -> Language:
    """The language of these fields."""
    found = content_language(StructuredBody.model_validate(fields), JsonStyle(), lambda text: "")
    assert found is not None
    return found


NESTED = {"type": "object", "properties": {"a": {"anyOf": [{"type": "integer"}, {"type": "foo"}]}}}
WRONG: list[tuple[dict[str, Any], str]] = [
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": NESTED}}},
        "response_format.json_schema.schema.properties.a.anyOf[1]",
    ),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema"),
    (
        {"structured_outputs": {"json": {"properties": {"b": {"pattern": "(", "type": "string"}}}}},
        "structured_outputs.json.properties.b",
    ),
    ({"structured_outputs": {"json": "{"}}, "structured_outputs.json"),
    ({"guided_json": {"$defs": {"x": {"type": "y"}}, "$ref": "#/$defs/x"}}, "guided_json.$defs.x"),
    ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex"),
    ({"structured_outputs": {"grammar": "start: ("}}, "structured_outputs.grammar"),
    ({"structured_outputs": {"structural_tag": "[]"}}, "structured_outputs.structural_tag"),
    (
        {"structured_outputs": {"regex": "a", "choice": ["a"]}},
        "structured_outputs.choice",
    ),
    ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex"),
    ({"structured_outputs": {"regex": "a" * (1 << 18)}}, "structured_outputs.regex"),
]


@pytest.mark.parametrize(("fields", "place"), WRONG, ids=[place for _, place in WRONG])
def test_faults_name_their_place(fields: dict[str, Any], place: str) -> None:
    with pytest.raises(InvalidRequest) as error:
        constraint(Wanted(language(**fields)), PLAIN)
    assert error.value.param == place
    assert place in error.value.message


TAG = {"begin": "<a>", "content": {"type": "any_text"}, "end": "</a>"}
TRIGGERED = {"type": "triggered_tags", "triggers": ["<"], "tags": [TAG]}
FORMATS: list[tuple[dict[str, Any], str, type[Exception]]] = [
    ({}, "", UnsupportedParameter),
    ({"type": "qwen_xml_parameter", "json_schema": {}}, "", UnsupportedParameter),
    ({"type": "json_schema", "json_schema": {}, "style": "qwen_xml"}, "", UnsupportedParameter),
    ({"type": "json_schema", "json_schema": 5}, ".json_schema", InvalidRequest),
    (
        {"type": "json_schema", "json_schema": NESTED},
        ".json_schema.properties.a.anyOf[1]",
        InvalidRequest,
    ),
    ({"type": "any_text", "excludes": ["a"]}, ".excludes", UnsupportedParameter),
    ({"type": "regex", "pattern": 5}, ".pattern", InvalidRequest),
    ({"type": "regex", "pattern": "("}, "", InvalidRequest),
    ({"type": "grammar", "grammar": "start: ("}, "", InvalidRequest),
    ({"type": "const_string"}, ".value", InvalidRequest),
    ({"type": "tag"} | TAG | {"end": [5]}, ".end", InvalidRequest),
    ({"type": "sequence", "elements": []}, ".elements", InvalidRequest),
    ({"type": "sequence", "elements": [5]}, ".elements[0]", InvalidRequest),
    (
        {"type": "sequence", "elements": [{"type": "any_text"}, TAG | {"type": "tag"}]},
        ".elements[0]",
        UnsupportedParameter,
    ),
    (
        {"type": "sequence", "elements": [TRIGGERED, TAG | {"type": "tag"}]},
        ".elements[0]",
        UnsupportedParameter,
    ),
    (TRIGGERED | {"triggers": ["x"]}, ".tags[0].begin", InvalidRequest),
    (TRIGGERED | {"tags": [TAG] * 5000}, ".tags[4095].content", InvalidRequest),
    ({"type": "plus", "content": {"type": "star"}}, ".content.content", UnsupportedParameter),
]


@pytest.mark.parametrize(("asked", "place", "kind"), FORMATS, ids=range(len(FORMATS)))
def test_faults_of_structural_tags(
    asked: dict[str, Any], place: str, kind: type[Exception]
) -> None:
    tags = {"type": "structural_tag", "format": asked}
    with pytest.raises(kind) as error:
        constraint(Wanted(language(response_format=tags)), PLAIN)
    assert isinstance(error.value, InvalidRequest)
    assert error.value.param == f"response_format.format{place}"
