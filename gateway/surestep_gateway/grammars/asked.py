"""Demands of a request's fields on its output."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel
from surestep_common.errors import InvalidRequest, UnsupportedParameter

from .config import JsonStyle
from .fields import ResponseFormat, StructuredBody, StructuredOutputs
from .language import Json, Language, TokenName
from .structural_tags import format_language, structures_language
from .structured import (
    any_object,
    choice_language,
    grammar_language,
    json_language,
    parsed_json,
    regex_language,
)

# The fields of a `response_format` that say what a type of it is.
_SAYING = {
    None: (),
    "text": (),
    "json_object": ("bare_schema",),
    "json_schema": ("json_schema", "bare_schema"),
    "structural_tag": ("structures", "triggers", "format"),
}
_NOTHING: tuple[Any, ...] = (None, "", False)  # values that ask for nothing


def content_language(body: StructuredBody, style: JsonStyle, token: TokenName) -> Language | None:
    """Return the language of a request's content, None for any text.

    `style` is the server's, `token` the tokenizer's. Raise InvalidRequest naming the field, also
    for two languages.
    """
    structured = body.structured_outputs or StructuredOutputs(json=None)
    style = _style(body, structured, style)
    found = [
        *_response_format(body.response_format or ResponseFormat(schema=None), style, token),
        *_structured(structured, style, token),
        *_by_themselves(body, style, token),
    ]
    if len(found) > 1:
        raise InvalidRequest(
            f"'{found[0].field}' and '{found[1].field}' both say what the output must be",
            param=found[1].field,
        )
    return found[0] if found else None


def _style(body: StructuredBody, asked: StructuredOutputs, style: JsonStyle) -> JsonStyle:
    compact, closed = asked.disable_any_whitespace, asked.disable_additional_properties
    return style._replace(
        any_whitespace=style.any_whitespace if compact is None else not compact,
        whitespace_pattern=asked.whitespace_pattern or body.guided_whitespace_pattern or None,
        additional_properties=style.additional_properties if closed is None else not closed,
    )


def _response_format(asked: ResponseFormat, style: JsonStyle, token: TokenName) -> list[Language]:
    field = "response_format"
    _refuse_unknown(asked, field)
    for name in ("json_schema", "bare_schema", "structures", "triggers", "format"):
        if getattr(asked, name) is not None and name not in _SAYING[asked.type]:
            place = f"{field}.{name.removeprefix('bare_')}"
            raise InvalidRequest(
                f"{place}: it does nothing with the type {asked.type!r}", param=place
            )
    match asked.type:
        case "json_object" if not asked.bare_schema:
            return [any_object(field, style)]
        case "json_object" | "json_schema":
            return [_with_schema(asked, field, style)]
        case "structural_tag":
            return [_tagged(asked, field, style, token)]
    return []


def _with_schema(asked: ResponseFormat, field: str, style: JsonStyle) -> Language:
    named, place = asked.json_schema, f"{field}.json_schema.schema"
    if named is not None:
        _refuse_unknown(named, f"{field}.json_schema")
    if named is None or named.json_schema is None:
        if asked.bare_schema is None:
            raise InvalidRequest(f"{place}: there must be a schema", param=place)
        return json_language(asked.bare_schema, f"{field}.schema", style)
    if asked.bare_schema is not None:
        raise InvalidRequest(f"{field}.schema: there are two schemas", param=f"{field}.schema")
    return json_language(named.json_schema, place, style)


def _structured(asked: StructuredOutputs, style: JsonStyle, token: TokenName) -> list[Language]:
    outer = "structured_outputs"
    _refuse_unknown(asked, outer)
    return [
        *_json(asked.json_schema, f"{outer}.json", style),
        *([any_object(f"{outer}.json_object", style)] if asked.json_object else ()),
        *_texts(asked.regex, asked.choice, asked.grammar, f"{outer}."),
        *_tags(asked.structural_tag, f"{outer}.structural_tag", style, token),
    ]


def _by_themselves(body: StructuredBody, style: JsonStyle, token: TokenName) -> list[Language]:
    """Return the languages of fields of their own: vLLM's older ones, SGLang's, llama.cpp's."""
    return [
        *_json(body.guided_json, "guided_json", style),
        *([any_object("guided_json_object", style)] if body.guided_json_object else ()),
        *_texts(body.guided_regex, body.guided_choice, body.guided_grammar, "guided_"),
        *_tags(body.structural_tag, "structural_tag", style, token),
        *_json(body.json_schema, "json_schema", style),
        *_texts(body.regex, None, body.grammar, ""),
        *([grammar_language(body.ebnf, "ebnf")] if body.ebnf else ()),
    ]


def _json(schema: str | Json | None, field: str, style: JsonStyle) -> list[Language]:
    return [] if schema in _NOTHING else [json_language(schema or {}, field, style)]


def _texts(
    regex: str | None, choice: list[str] | None, grammar: str | None, prefix: str
) -> list[Language]:
    found = []
    if regex:
        found.append(regex_language(regex, f"{prefix}regex"))
    if choice is not None:
        found.append(choice_language(choice, f"{prefix}choice"))
    if grammar:
        found.append(grammar_language(grammar, f"{prefix}grammar"))
    return found


def _tags(
    asked: str | Json | None, field: str, style: JsonStyle, token: TokenName
) -> list[Language]:
    """Return the language of a structural tag, which may be JSON text."""
    if not asked:
        return []
    try:
        given: Any = parsed_json(asked) if isinstance(asked, str) else asked
        kind = {"type": "structural_tag"}
        parsed = ResponseFormat.model_validate(kind | given if isinstance(given, dict) else given)
    except ValueError as error:
        raise InvalidRequest(f"{field}: not a structural tag: {error}", param=field) from None
    _refuse_unknown(parsed, field)
    return [_tagged(parsed, field, style, token)]


def _tagged(asked: ResponseFormat, field: str, style: JsonStyle, token: TokenName) -> Language:
    if asked.format is None:
        for number, one in enumerate(asked.structures or ()):
            _refuse_unknown(one, f"{field}.structures[{number}]")
        return structures_language(
            asked.structures or (), asked.triggers or (), field, style, token
        )
    if asked.structures or asked.triggers:
        raise InvalidRequest(
            f"{field}.format: there are 'structures' or 'triggers' too", param=f"{field}.format"
        )
    return format_language(asked.format, f"{field}.format", style, token)


def _refuse_unknown(asked: BaseModel, field: str) -> None:
    """Raise UnsupportedParameter for an unknown field: it may say what the output must be.

    vLLM's own clients send private ones, which begin with an underscore.
    """
    for name, value in (asked.model_extra or {}).items():
        if value not in _NOTHING and not name.startswith("_"):
            place = f"{field}.{name[:64]}"
            raise UnsupportedParameter(f"'{place}' is not supported", param=place)
