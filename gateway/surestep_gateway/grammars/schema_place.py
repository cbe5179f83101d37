"""Where in a JSON schema a fault lies: llguidance says what is wrong, but not where."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from .language import Json, Language, Rules, fault_in, source_of

_TRIALS = 128  # parts of a schema that are looked at by themselves
_TRIAL_S = 0.1  # for all of them: of a costly schema the fault is named without its place
_BY_NAME = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_SINGLE = ("items", "additionalProperties", "contains", "not", "if", "then", "else")


LENIENT: Json = {"x-guidance": {"lenient": True}}  # llguidance leaves out what it does not know


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
