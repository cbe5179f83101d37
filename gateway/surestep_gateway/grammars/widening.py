"""Schemas with what llguidance does not know, in words that it does.

`reworded` describes the same documents. `widened` describes more: all that the client's schema
allows, and some that it does not. Answers are then checked against the client's schema.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from .closing import INSIDE, PARTS, changed, definition
from .language import Json

_FORMATS = {  # that llguidance keeps to; others are annotations, as in JSON Schema
    "date-time",
    "date",
    "time",
    "duration",
    "email",
    "hostname",
    "ipv4",
    "ipv6",
    "uuid",
    "uri",
}
_SAME_FORMATS = {f"uuid{version}": "uuid" for version in range(1, 9)}  # as pydantic has them
_KEYS = {  # patterns of keys that have a format
    "uuid": "^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$",
    "date": "^[0-9]{4}-(0[1-9]|1[0-2])-(0[1-9]|[12][0-9]|3[01])$",
}
_ANNOTATIONS = {"type", "title", "description", "default", "examples", "$comment"}
_MOST_DEPENDENT = 3  # keys of an object: each doubles its alternatives
_LENGTHS = ("minLength", "maxLength")
_PIECE = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\(\?<?[=!]|.", re.DOTALL)  # of a pattern
_ENDS = {r"\Z": "$", r"\z": "$", r"\A": "^"}
_REFERS_BACK = re.compile(r"\\[1-9k]|\(\?P=")

Edit = Callable[[Json], Any]


def reworded(schema: Json) -> Json:
    """Return a schema of the same documents without words that llguidance need not know.

    Formats that it does not know are left out: they are annotations.
    """

    def edit(part: Json) -> Any:
        if part.get("not") in ({}, True):
            return False
        part = _with_known_format(part)
        part = _with_plain_keys(_with_pattern(part, _with_plain_ends))
        return _with_dependent(_with_named_keys(part, schema))

    found: Json = _edited(schema, edit)
    return found


def widened(schema: Json) -> Json:
    """Return the nearest schema of which llguidance may leave out what it does not know."""

    def edit(part: Json) -> Any:
        part = _with_wider_keys(_with_pattern(part, _without_looks))
        return _with_one_of(_with_if(_without_counts(_with_fewer(part, schema))))

    found: Json = _edited(schema, edit)
    return found


def without_lengths(schema: Json) -> Json:
    """Return a schema without lengths beside patterns, which may be too much for llguidance."""

    def edit(part: Json) -> Any:
        has_pattern = isinstance(part.get("pattern"), str)
        return {key: part[key] for key in part if not (has_pattern and key in _LENGTHS)}

    found: Json = _edited(schema, edit)
    return found


def with_numeric_bounds(schema: Json) -> Json:
    """Return a schema without the bounds of draft 4, where `exclusiveMaximum` is true or false."""

    def edit(part: Json) -> Any:
        for plain, exclusive in (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")):
            if isinstance(part.get(exclusive), bool):
                bound = {exclusive: part[plain]} if part[exclusive] and plain in part else {}
                part = _without(part, exclusive, *((plain,) if bound else ())) | bound
        return part

    found: Json = _edited(schema, edit)
    return found


def _edited(schema: Any, edit: Edit) -> Any:
    if not isinstance(schema, dict):
        return schema

    def inner(part: Any) -> Any:
        return _edited(part, edit)

    return edit(changed(changed(schema, INSIDE, inner), PARTS, inner))


def _without(schema: Json, *keys: str) -> Json:
    return {key: value for key, value in schema.items() if key not in keys}


def _and(schema: Json, *parts: Json) -> Json:
    """Return a schema with more parts that describe the same value."""
    given = schema.get("allOf")
    return schema | {"allOf": [*(given if isinstance(given, list) else ()), *parts]}


def _with_known_format(schema: Json) -> Json:
    name = schema.get("format")
    if not isinstance(name, str) or name in _FORMATS:
        return schema
    same = {"format": _SAME_FORMATS[name]} if name in _SAME_FORMATS else {}
    return _without(schema, "format") | same


def _with_named_keys(schema: Json, whole: Json) -> Json:
    """Return an object's schema that names its keys, in place of a schema for them."""
    names = _resolved(schema.get("propertyNames"), whole)
    others = schema.get("additionalProperties", True)
    if (
        names is None
        or others is False
        or not {"properties", "patternProperties"}.isdisjoint(schema)
    ):
        return schema
    shown = _without(schema, "propertyNames")
    told = names.keys() - _ANNOTATIONS
    values = names.get("enum") if told == {"enum"} else [names.get("const")]
    if not told:
        return shown
    if told in ({"enum"}, {"const"}) and isinstance(values, list):
        named = {name: others for name in values if isinstance(name, str)}
        return shown | {"properties": named, "additionalProperties": False}
    pattern = _pattern_of(names, told)
    if pattern is None:
        return schema
    return shown | {"patternProperties": {pattern: others}, "additionalProperties": False}


def _pattern_of(names: Json, told: set[str]) -> str | None:
    """Return the pattern that keys must have, where one says all of it."""
    if told == {"pattern"} and isinstance(names["pattern"], str):
        return _with_plain_ends(names["pattern"])
    if told == {"format"}:
        return _KEYS.get(str(names["format"]))
    least, most = names.get("minLength", 0), names.get("maxLength", "")
    if told <= {*_LENGTHS} and isinstance(least, int) and isinstance(most, int | str):
        return f"^(?s:.{{{least},{most}}})$"
    return None


def _resolved(schema: Any, whole: Json) -> Json | None:
    """Return a schema, or the definition that it refers to and nothing else."""
    if isinstance(schema, dict) and schema.keys() == {"$ref"}:
        place = definition(str(schema["$ref"]), whole)
        schema = whole[place[0]][place[1]] if place else None
    return schema if isinstance(schema, dict) else None


def _with_dependent(schema: Json) -> Json:
    """Return an object's schema with alternatives in place of keys that require others."""
    for word in ("dependentRequired", "dependencies"):
        needs = schema.get(word)
        if "properties" in schema and isinstance(needs, dict) and len(needs) <= _MOST_DEPENDENT:
            lists = all(isinstance(others, list) for others in needs.values())
            if lists:
                parts = (
                    {"anyOf": [{"properties": {key: False}}, {"required": others}]}
                    for key, others in needs.items()
                )
                schema = _and(_without(schema, word), *parts)
    return schema


def _with_if(schema: Json) -> Json:
    """Return a schema with two alternatives in place of a condition."""
    if not {"if", "then", "else"} <= schema.keys():
        return _without(schema, "if", "then", "else")
    then = {"allOf": [schema["if"], schema["then"]]}
    return _and(_without(schema, "if", "then", "else"), {"anyOf": [then, schema["else"]]})


def _with_one_of(schema: Json) -> Json:
    if "oneOf" not in schema:
        return schema
    shown = _without(schema, "oneOf")
    if "anyOf" in schema:
        return _and(shown, {"anyOf": schema["oneOf"]})
    return shown | {"anyOf": schema["oneOf"]}


def _with_fewer(schema: Json, whole: Json) -> Json:
    """Return an array's schema with no more items than there are different ones."""
    items = _resolved(schema.get("items"), whole)
    if schema.get("uniqueItems") is not True or items is None:
        return schema
    values = items.get("enum")
    if isinstance(values, list) and "maxItems" not in schema:
        return schema | {"maxItems": len(values)}
    return schema


def _without_counts(schema: Json) -> Json:
    """Return an object's schema without numbers of keys where some keys need not be there.

    llguidance counts those alone that a schema does not name.
    """
    properties, required = schema.get("properties"), schema.get("required")
    required = required if isinstance(required, list) else []
    if isinstance(properties, dict) and any(name not in required for name in properties):
        return _without(schema, "minProperties", "maxProperties")
    return schema


def _with_pattern(schema: Json, change: Callable[[str], str | None]) -> Json:
    """Return a schema with its pattern changed; None: any text."""
    pattern = schema.get("pattern")
    if not isinstance(pattern, str):
        return schema
    new = change(pattern)
    return _without(schema, "pattern") | ({} if new is None else {"pattern": new})


def _with_plain_keys(schema: Json) -> Json:
    named = schema.get("patternProperties")
    if not isinstance(named, dict):
        return schema
    shown = {_with_plain_ends(pattern): part for pattern, part in named.items()}
    return schema | {"patternProperties": shown}


def _with_wider_keys(schema: Json) -> Json:
    """Return an object's schema whose patterns of keys are those that llguidance knows.

    A wider pattern says more of other keys, unless those are barred. So most are left out, and
    their keys may have any value.
    """
    named = schema.get("patternProperties")
    if not isinstance(named, dict):
        return schema
    new = {pattern: _without_looks(pattern) for pattern in named}
    if all(pattern == wide for pattern, wide in new.items()):
        return schema
    barred = schema.get("additionalProperties") is False and not schema.get("properties")
    if barred and len(named) == 1:
        return schema | {"patternProperties": {new[key] or "^": named[key] for key in named}}
    kept = {pattern: part for pattern, part in named.items() if new[pattern] == pattern}
    return schema | {"patternProperties": kept, "additionalProperties": True}


def _with_plain_ends(pattern: str) -> str:
    """Return a pattern with `^` and `$` for Python's words for them."""
    if not any(end in pattern for end in _ENDS):
        return pattern
    return "".join(_ENDS.get(piece, piece) for piece in _PIECE.findall(pattern))


def _without_looks(pattern: str) -> str | None:
    """Return a pattern that looks neither ahead nor behind; None where it refers to itself.

    One that cannot be checked either stays as it is, and llguidance says what is wrong.
    """
    looks = any(look in pattern for look in ("(?=", "(?!", "(?<=", "(?<!"))
    if not looks and not _REFERS_BACK.search(pattern):
        return pattern
    try:
        re.compile(pattern)
    except (re.error, OverflowError, RecursionError):
        return pattern
    if _REFERS_BACK.search(pattern):
        return None
    kept, depth, behind = [], 0, False
    for piece in _PIECE.findall(pattern):
        if depth == 0 and behind and piece in "*+?{":
            return None
        behind = False
        if len(piece) > 2 and piece.startswith("(?"):
            depth += 1
        elif depth and piece in "()":
            depth += 1 if piece == "(" else -1
            behind = depth == 0
        elif depth == 0:
            kept.append(piece)
    return "".join(kept)
