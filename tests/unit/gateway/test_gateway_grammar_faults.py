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
    found = content_language(StructuredBody.model_validate(fields), JsonStyle(), lambda text: False)
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


def test_newer_structural_tags_are_refused_by_name() -> None:
    asked = {"type": "structural_tag", "format": {"type": "any_text"}}
    with pytest.raises(UnsupportedParameter, match=r"response_format\.format"):
        language(response_format=asked)
