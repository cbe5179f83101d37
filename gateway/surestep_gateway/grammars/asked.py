"""What a request's fields ask of its output."""

from __future__ import annotations

from typing import Any

from surestep_common.errors import InvalidRequest, UnsupportedParameter

from .config import JsonStyle
from .fields import ResponseFormat, StructuredBody, StructuredOutputs
from .language import IsToken, Json, Language
from .structured import (
    ANY_OBJECT,
    choice_language,
    grammar_language,
    json_language,
    parsed_json,
    regex_language,
    styled,
    tagged_language,
)


def content_language(body: StructuredBody, style: JsonStyle, is_token: IsToken) -> Language | None:
    """Return the language of a request's content, None for any text.

    `style` is the server's, `is_token` the tokenizer's. Raise InvalidRequest naming the field, also
    for two languages.
    """
    structured = body.structured_outputs or StructuredOutputs(json=None)
    style = _style(body, structured, style)
    found = [
        *_response_format(body.response_format or ResponseFormat(), style, is_token),
        *_structured(structured, style, is_token),
        *_guided(body, style, is_token),
    ]
    if len(found) > 1:
        raise InvalidRequest(
            f"'{found[0].field}' and '{found[1].field}' both say what the output must be",
            param=found[1].field,
        )
    return found[0] if found else None


def _style(body: StructuredBody, asked: StructuredOutputs, style: JsonStyle) -> JsonStyle:
    compact, closed = asked.disable_any_whitespace, asked.disable_additional_properties
    return JsonStyle(
        any_whitespace=style.any_whitespace if compact is None else not compact,
        whitespace_pattern=asked.whitespace_pattern or body.guided_whitespace_pattern or None,
        additional_properties=style.additional_properties if closed is None else not closed,
    )


def _response_format(asked: ResponseFormat, style: JsonStyle, is_token: IsToken) -> list[Language]:
    field = "response_format"
    match asked.type:
        case "json_object":
            return [Language(field, schema=styled(ANY_OBJECT, style))]
        case "json_schema":
            schema = asked.json_schema.json_schema if asked.json_schema is not None else None
            if schema is None:
                place = f"{field}.json_schema.schema"
                raise InvalidRequest(f"{place}: there must be a schema", param=place)
            return [json_language(schema, f"{field}.json_schema.schema", style)]
        case "structural_tag":
            if asked.format is not None:
                raise _only_structures(f"{field}.format")
            structures = [one.model_dump(by_alias=True) for one in asked.structures or ()]
            return [_tagged(structures, asked.triggers or [], field, style, is_token)]
    return []


def _structured(asked: StructuredOutputs, style: JsonStyle, is_token: IsToken) -> list[Language]:
    outer, found = "structured_outputs", []
    if asked.json_schema:
        found.append(json_language(asked.json_schema, f"{outer}.json", style))
    if asked.json_object:
        found.append(Language(f"{outer}.json_object", schema=styled(ANY_OBJECT, style)))
    if asked.regex:
        found.append(regex_language(asked.regex, f"{outer}.regex"))
    if asked.choice:
        found.append(choice_language(asked.choice, f"{outer}.choice"))
    if asked.grammar:
        found.append(grammar_language(asked.grammar, f"{outer}.grammar"))
    if asked.structural_tag:
        found.append(_parsed_tags(asked.structural_tag, f"{outer}.structural_tag", style, is_token))
    return found


def _guided(body: StructuredBody, style: JsonStyle, is_token: IsToken) -> list[Language]:
    """Return the languages of vLLM's older fields."""
    found = []
    if body.guided_json:
        found.append(json_language(body.guided_json, "guided_json", style))
    if body.guided_regex:
        found.append(regex_language(body.guided_regex, "guided_regex"))
    if body.guided_choice:
        found.append(choice_language(body.guided_choice, "guided_choice"))
    if body.guided_grammar:
        found.append(grammar_language(body.guided_grammar, "guided_grammar"))
    if body.structural_tag:
        found.append(_parsed_tags(body.structural_tag, "structural_tag", style, is_token))
    return found


def _parsed_tags(text: str, field: str, style: JsonStyle, is_token: IsToken) -> Language:
    try:
        asked: Any = parsed_json(text)
        if isinstance(asked, dict) and asked.get("format") is not None:
            raise _only_structures(f"{field}.format")
        parsed = ResponseFormat.model_validate(asked)
    except ValueError as error:
        raise InvalidRequest(f"{field}: not a structural tag: {error}", param=field) from None
    structures = [one.model_dump(by_alias=True) for one in parsed.structures or ()]
    return _tagged(structures, parsed.triggers or [], field, style, is_token)


def _tagged(
    structures: list[Json], triggers: list[str], field: str, style: JsonStyle, is_token: IsToken
) -> Language:
    if not structures or not triggers:
        raise InvalidRequest(f"{field}: it needs 'structures' and 'triggers'", param=field)
    return tagged_language(structures, triggers, field, style, is_token)


def _only_structures(field: str) -> UnsupportedParameter:
    return UnsupportedParameter(
        f"'{field}' is not supported: structural tags have 'structures' and 'triggers' here",
        param=field,
    )
