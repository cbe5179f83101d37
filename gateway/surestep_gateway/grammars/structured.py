"""Structured outputs: from the values of a request's fields to languages.

A schema that cannot be served is refused with the place of its fault: llguidance says what is
wrong, but not where.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import llguidance
from pydantic_core import from_json
from surestep_common.errors import InvalidRequest
from surestep_common.request_params import JSON_WHITE_SPACE, MAX_GRAMMAR_BYTES

from surestep_gateway.grammars.closing import closed
from surestep_gateway.grammars.config import JsonStyle
from surestep_gateway.grammars.language import Json, Language, Rules, fault_in, source_of
from surestep_gateway.grammars.widening import reworded, widened, without_lengths

ANY_OBJECT: Json = {"type": "object"}
_TRIALS = 128  # parts of a schema that are looked at by themselves
_TRIAL_S = 0.1  # for all of them: of a costly schema the fault is named without its place
_BY_NAME = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_SINGLE = ("items", "additionalProperties", "contains", "not", "if", "then", "else")
LENIENT: Json = {"x-guidance": {"lenient": True}}  # llguidance leaves out what it does not know


class Served(NamedTuple):
    """A schema for the grammar; it allows more than the client's where it is `wider`."""

    schema: Json
    wider: bool = False


def json_language(schema: str | Json, field: str, style: JsonStyle) -> Language:
    """Return the language of the JSON that a schema allows. Raise InvalidRequest."""
    if isinstance(schema, str):
        schema = _parsed(schema, field)
    found = served_schema(schema, field, style)
    return Language(
        field,
        schema=styled(found.schema, style),
        promised=schema if found.wider else None,
    )


def any_object(field: str, style: JsonStyle) -> Language:
    """Return the language of all JSON objects."""
    return Language(field, schema=styled(ANY_OBJECT, style))


def served_schema(schema: Json, field: str, style: JsonStyle) -> Served:
    """Return the nearest schema that llguidance knows.

    Raise InvalidRequest that names the place at fault.
    """
    if len(json.dumps(schema, ensure_ascii=False)) > MAX_GRAMMAR_BYTES:
        raise InvalidRequest(
            f"{field}: the schema must have at most {MAX_GRAMMAR_BYTES} bytes", param=field
        )
    try:
        return _nearest(schema, field, style)
    except RecursionError:
        raise InvalidRequest(f"{field}: the schema is too deep", param=field) from None


def _nearest(schema: Json, field: str, style: JsonStyle) -> Served:
    shown = reworded(schema)
    if not style.additional_properties:
        shown = closed(shown)
    if not fault_in_schema(shown):
        return Served(shown)
    for widen in (widened, without_lengths) if style.lenient else ():
        shown = widen(shown)
        if not fault_in_schema(shown | LENIENT):
            return Served(shown, wider=True)
    place, fault = fault_place(shown, field, LENIENT if style.lenient else {})
    raise InvalidRequest(f"{place}: {fault}", param=place)


def exact_schema(schema: Json, field: str, style: JsonStyle) -> Json:
    """Return a schema of the same documents that llguidance knows. Raise InvalidRequest."""
    return served_schema(schema, field, style._replace(lenient=False)).schema


def styled(schema: Json, style: JsonStyle) -> Json:
    """Return a schema that says how its JSON looks."""
    options: Json = {"whitespace_flexible": False}
    if style.any_whitespace:
        options = {"whitespace_pattern": style.whitespace_pattern or JSON_WHITE_SPACE}
    return schema | {"x-guidance": options | {"lenient": True}}


def regex_language(regex: str, field: str) -> Language:
    """Return the language of a regular expression, which must match the whole output."""
    return Language(field, lark=f"start: /{llguidance.regex_to_lark(regex)}/")


def choice_language(choices: Sequence[str], field: str) -> Language:
    """Return the language of these texts: one lexeme, as each of many rules is an item of the
    parser. Raise InvalidRequest for none.
    """
    if not choices:
        raise InvalidRequest(f"{field}: there must be a text to choose", param=field)
    spelled = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in choices)
    return Language(field, lark=f"start: CHOICE\nCHOICE: {spelled}")


def grammar_language(grammar: str, field: str) -> Language:
    """Return the language of a grammar in Lark or GBNF. Raise InvalidRequest."""
    try:
        return Language(field, lark=llguidance.grammar_from("grammar", grammar))
    except Exception as error:  # noqa: BLE001  # a parser in Python, of what clients write
        raise InvalidRequest(f"{field}: {error}", param=field) from None


def parsed_json(text: str) -> Any:
    """Parse JSON as bodies are read: neither deep nor with half characters. Raise ValueError."""
    return from_json(text, allow_inf_nan=False)


def _parsed(text: str, field: str) -> Json:
    try:
        schema = parsed_json(text)
    except ValueError as error:
        raise InvalidRequest(f"{field}: not valid JSON: {error}", param=field) from None
    if not isinstance(schema, dict):
        raise InvalidRequest(f"{field}: a schema is an object", param=field)
    return schema


def fault_in_schema(schema: Json) -> str:
    """Return what is wrong with a schema; nothing if it can be compiled."""
    return fault_in(source_of(Rules("@body"), {"body": Language("", schema=schema)}))


def fault_place(schema: Json, field: str, options: Json) -> tuple[str, str]:
    """Return the place of the first fault of a schema that has one, and the fault.

    `options` are what it is compiled with.
    """
    fault = _fault(schema, schema, options)
    trials, place, end = _TRIALS, field, time.process_time() + _TRIAL_S
    at: Json | None = schema
    while at is not None:
        found = None
        for name, part in _parts(at):
            trials -= 1
            if trials < 0 or time.process_time() > end:
                return place, fault
            if inner := _fault(part, schema, options):
                found, place, fault = part, f"{place}.{name}", inner
                break
        at = found
    return place, fault


def _parts(schema: Json) -> Iterator[tuple[str, Json]]:
    for key in _BY_NAME:
        named = schema.get(key)
        for name, part in named.items() if isinstance(named, dict) else ():
            yield from _part(f"{key}.{name}", part)
    for key in _LISTS:
        parts = schema.get(key)
        for number, part in enumerate(parts if isinstance(parts, list) else ()):
            yield from _part(f"{key}[{number}]", part)
    for key in _SINGLE:
        yield from _part(key, schema.get(key))


def _part(name: str, part: Any) -> Iterator[tuple[str, Json]]:
    if isinstance(part, dict):
        yield name, part


def _fault(part: Json, whole: Json, options: Json) -> str:
    """Return what is wrong with a part of a schema, which may refer to definitions of the whole."""
    shared = {key: whole[key] for key in ("$defs", "definitions") if key in whole}
    return fault_in_schema(shared | part | options)
