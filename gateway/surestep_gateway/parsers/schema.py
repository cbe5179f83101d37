"""Parameters as JSON, typed by the schema of a tool."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from .literals import json_of_python

_MOST_ALTERNATIVES = 1000  # that are looked at: schemas come with the request
_DEEPEST = 100

Types = frozenset[str]  # names of JSON Schema's types; empty = anything
# Of a value that is known to be JSON, where strings are quoted.
ANY_JSON = Types({"array", "boolean", "integer", "null", "number", "object", "quoted"})

_NO_JSON = object()
_PYTHON = {"True": "true", "False": "false", "None": "null"}  # templates print them so


def json_types(schema: Mapping[str, Any], key: str) -> Types:
    """Return the types that the schema of an object allows for the property `key`."""
    return _types(properties(schema).get(key), schema)


def properties(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return the properties that the schema of an object names."""
    named = schema.get("properties")
    return named if isinstance(named, dict) else {}


def _types(schema: Any, root: Mapping[str, Any]) -> Types:
    """Return the types of all alternatives, references followed once; any type for very many."""
    found: set[str] = set()
    followed: set[str] = set()
    left = [schema]
    for _ in range(_MOST_ALTERNATIVES):
        if not left:
            return frozenset(found)
        one = left.pop()
        if not isinstance(one, dict):
            continue
        given = one.get("type")
        listed = given if isinstance(given, list) else [given]
        found |= {name for name in listed if isinstance(name, str)}
        found |= {name for value in _listed(one, "enum") for name in _types_of(value)}
        left += (each for name in ("anyOf", "oneOf", "allOf") for each in _listed(one, name))
        reference = one.get("$ref")
        if isinstance(reference, str) and reference not in followed:
            followed.add(reference)
            left.append(resolved(reference, root))
    return frozenset()


def _listed(schema: Mapping[str, Any], key: str) -> list[Any]:
    value = schema.get(key)
    return value[:_MOST_ALTERNATIVES] if isinstance(value, list) else []


def resolved(reference: str, root: Any) -> Any:
    """Return the target of a local reference such as `#/$defs/Address`."""
    found = root
    for part in reference.removeprefix("#/").split("/", _DEEPEST)[:_DEEPEST]:
        found = found.get(part) if isinstance(found, dict) else None
    return found


def json_text(text: str, types: Types) -> str:
    """Return `text` unchanged where it is JSON of one of `types`, else as a JSON string.

    Lists and objects are translated from Python: templates print them so, too.
    """
    candidate = text.strip()
    candidate = _PYTHON.get(candidate, candidate)
    value = _value(candidate)
    if value is _NO_JSON and candidate[:1] in ("[", "{") and types and "string" not in types:
        candidate = json_of_python(candidate)
        value = _value(candidate)
    kinds = {"quoted"} if isinstance(value, str) else _types_of(value)
    if value is not _NO_JSON and kinds & types:
        return candidate
    return json.dumps(text, ensure_ascii=False)


def _value(text: str) -> Any:
    """Return the value of a JSON text, _NO_JSON for other texts."""
    try:
        return json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return _NO_JSON


def _refuse(constant: str) -> None:
    raise ValueError(constant)  # Python's NaN and Infinity are no JSON


def _types_of(value: Any) -> set[str]:
    match value:
        case None:
            return {"null"}
        case bool():
            return {"boolean"}
        case int():
            return {"integer", "number"}
        case float():
            return {"number", "integer"} if value.is_integer() else {"number"}
        case str():
            return {"string"}
        case list():
            return {"array"}
        case _:
            return {"object"}
