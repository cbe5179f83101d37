"""Values of flags: how many a flag takes, and how their text is parsed."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from enum import Enum, auto
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic.fields import FieldInfo
from surestep_common.config import human_int, split_names

from .vllm_flags import VllmFlag

TRUTH = {"true": True, "false": False}


class FlagKind(Enum):
    """The values that follow a flag."""

    SWITCH = auto()  # nothing, or true or false
    ONE = auto()
    OPTIONAL = auto()  # one value or nothing
    REPEATED = auto()  # one value, or several with commas, as often as one likes
    MANY = auto()  # values up to the next flag
    MAPPING = auto()


def kind_of_flag(flag: VllmFlag) -> FlagKind:
    """Return the kind that the table of vLLM's flags gives."""
    if not flag.kind:
        return FlagKind.SWITCH
    if flag.kind.endswith("..."):
        return FlagKind.MANY
    if flag.kind.startswith("["):
        return FlagKind.OPTIONAL
    return FlagKind.MAPPING if flag.kind == "JSON" else FlagKind.ONE


def kind_of_field(field: FieldInfo) -> FlagKind:
    """Return the kind by the type of a setting."""
    types = set(types_of(field.annotation))
    if dict in types:
        return FlagKind.MAPPING
    if types & {tuple, list}:
        return FlagKind.REPEATED
    return FlagKind.SWITCH if bool in types else FlagKind.ONE


def types_of(annotation: Any) -> Iterable[Any]:
    """Return the plain types, or Literals, in an annotation, without None."""
    origin = get_origin(annotation)
    if origin in (Union, UnionType):
        for part in get_args(annotation):
            yield from types_of(part)
    elif origin is Annotated:
        yield from types_of(get_args(annotation)[0])
    elif annotation is not type(None):
        yield origin or annotation


def truth(value: Any) -> bool:
    """Return the value of a switch. Raise ValueError."""
    if isinstance(value, bool):
        return value
    if (known := TRUTH.get(str(value).lower())) is None:
        raise ValueError(f"takes true or false, or nothing, not {value!r}")
    return known


def names(value: Any) -> list[str]:
    """Return a list, from one or from text with commas or in JSON."""
    values = value if isinstance(value, list) else [value]
    return [str(name) for part in values for name in split_names(str(part))]


def mapping(value: Any) -> dict[str, Any] | None:
    """Return a mapping from JSON, or from key=value with commas between, an empty one from "none",
    and None, which leaves it to the program, from "auto". Raise ValueError.
    """
    if isinstance(value, dict):
        return value
    text = str(value).strip()
    if text in ("auto", "none"):
        return {} if text == "none" else None
    if text and not text.startswith(("{", "[", '"')):
        pairs = [part.partition("=") for part in text.split(",")]
        if all(equals for _, equals, _ in pairs):
            return {key.strip(): scalar(given) for key, _, given in pairs}
    try:
        found = json.loads(text)
    except ValueError as error:
        raise ValueError(f"takes a JSON object: {error}, got {text!r}") from error
    if not isinstance(found, dict):
        raise ValueError(f"takes a JSON object, got {text!r}")
    return found


def nested(keys: str, text: str) -> dict[str, Any]:
    """Return `a.b VALUE` as {"a": {"b": VALUE}}; `a+ X,Y` as {"a": ["X", "Y"]}."""
    value = list(text.split(",")) if keys.endswith("+") else scalar(text)
    for key in reversed(keys.removesuffix("+").split(".")):
        value = {key: value}
    assert isinstance(value, dict)
    return value


def scalar(value: Any) -> Any:
    """Return the value of JSON, of a number with a suffix, or else the text."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError:
        pass
    try:
        return human_int(value)
    except ValueError:
        return value


def merged(first: Mapping[str, Any], then: Mapping[str, Any]) -> dict[str, Any]:
    """Merge two mappings; the second's values win, mappings and lists are joined."""
    both = {**first, **then}
    for key in first.keys() & then.keys():
        old, new = first[key], then[key]
        if isinstance(old, dict) and isinstance(new, dict):
            both[key] = merged(old, new)
        elif isinstance(old, list) and isinstance(new, list):
            both[key] = old + new
    return both
