"""Closing the objects of a schema, so that their documents end: no keys but those that it names.

JSON Schema lets an object have any further keys where `additionalProperties` is absent. A model
that writes under such a grammar may go on with keys that were not asked for, up to `max_tokens`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from .language import Json

_DEFINITIONS = ("$defs", "definitions")
# Keys whose schemas describe what is inside the value: by name, as a list, alone.
INSIDE = (
    (*_DEFINITIONS, "properties", "patternProperties"),
    ("prefixItems", "items"),
    ("items", "additionalItems", "additionalProperties", "contains"),
)
# Keys whose schemas describe the value itself, in the same order.
PARTS = (("dependentSchemas",), ("allOf", "anyOf", "oneOf"), ("if", "then", "else"))
_SAYS_KEYS = ("properties", "patternProperties")
_MOST_PARTS = 20_000  # that are looked at, each as often as it is a part, and names that are added

Change = Callable[[Any], Any]


def closed(schema: Json) -> Json:
    """Return a schema whose objects have no keys but those that it names.

    An object stays open that says so (`additionalProperties`, `unevaluatedProperties`) or that
    names no keys. Where several parts describe one object (`allOf`, `anyOf` beside `properties`,
    `$ref` beside them), it may have the keys of all of them.
    """
    return _Closing(schema).whole()


class _Names:
    """The keys of an object that its parts name; it is `open` where a part allows any."""

    def __init__(self) -> None:
        self.names: dict[str, None] = {}
        self.open = False
        self.said = False  # which keys there are

    def add(self, part: Json) -> None:
        for named in (_mapping(part.get("properties")), _list(part.get("required"))):
            self.names |= dict.fromkeys(name for name in named if isinstance(name, str))
        self.said |= not {*_SAYS_KEYS}.isdisjoint(part)
        self.open |= any(
            part.get(key, False) is not False
            for key in ("additionalProperties", "unevaluatedProperties")
        )


class _Closing:
    def __init__(self, schema: Json) -> None:
        self._schema = schema
        self._opened = dict[str, None]()  # references to definitions, from parts
        self._waiting = list[tuple[str, str]]()  # the places of these
        self._left = _MOST_PARTS

    def whole(self) -> Json:
        """Return the closed schema, with a second, open one of each definition that is a part."""
        shown: Json = self._close(self._schema)
        for key, name in self._waiting:  # which grows meanwhile
            shown[key][_opened(name)] = self._leave(self._schema[key][name])
        return shown

    def _close(self, schema: Any) -> Any:
        """Return the schema of a value, closed."""
        if not isinstance(schema, dict):
            return schema
        if _is_one_of_many(schema):
            return changed(changed(schema, INSIDE, self._close), PARTS, self._close)
        shown: Json = self._leave(schema)
        found = self._named(schema)
        if found.open or not found.said or not _has_room(schema, found.names):
            return shown
        own = _mapping(shown.get("properties"))
        more = [name for name in found.names if name not in own]
        self._left -= len(more)
        return shown | {
            "properties": own | dict.fromkeys(more, True),
            "additionalProperties": False,
        }

    def _leave(self, schema: Any) -> Any:
        """Return a part of a value's schema. Only what is inside the value is closed: a closed part
        would bar the keys of the others.
        """
        if not isinstance(schema, dict):
            return schema
        shown = changed(changed(schema, INSIDE, self._close), PARTS, self._leave)
        reference = str(schema.get("$ref"))
        place = self._definition(reference)
        if place is None:
            return shown
        if reference not in self._opened:
            self._opened[reference] = None
            self._waiting.append(place)
        return shown | {"$ref": _opened(reference)}

    def _named(self, schema: Json) -> _Names:
        found, seen, parts = _Names(), set[str](), [schema]
        found.open = schema.get("additionalProperties") is False  # the schema has said it
        for part in parts:  # which grow meanwhile
            self._left -= 1
            found.add(part)
            parts += _parts(part)
            reference = str(part.get("$ref", ""))
            if reference and reference not in seen:
                seen.add(reference)
                place = self._definition(reference)
                target = self._schema[place[0]][place[1]] if place else None
                parts += [target] if isinstance(target, dict) else []
                found.open |= not isinstance(target, dict)
            if found.open or self._left < 0:
                found.open = True
                break
        return found

    def _definition(self, reference: str) -> tuple[str, str] | None:
        """Return the place of a definition that can be opened; None for any other target."""
        place = definition(reference, self._schema)
        return place if place and _opened(place[1]) not in self._schema[place[0]] else None


def definition(reference: str, schema: Json) -> tuple[str, str] | None:
    """Return where in a schema the definition is that a reference names; None for other targets."""
    for key in _DEFINITIONS:
        name = reference.removeprefix(f"#/{key}/")
        if name in _mapping(schema.get(key)) and reference == f"#/{key}/{name}":
            return key, name
    return None


def _opened(name: str) -> str:
    return f"{name}__open"


def _is_one_of_many(schema: Json) -> bool:
    """Return whether a schema is what one of its alternatives is, and says nothing of keys."""
    parts = [key for key in (*PARTS[0], *PARTS[1], *PARTS[2], "$ref") if key in schema]
    if len(parts) != 1 or not {*_SAYS_KEYS, "required", "additionalProperties"}.isdisjoint(schema):
        return False
    part = schema[parts[0]]
    return parts[0] in ("anyOf", "oneOf", "$ref") or (parts == ["allOf"] and len(_list(part)) == 1)


def _has_room(schema: Json, names: Mapping[str, None]) -> bool:
    """Return whether an object with these names alone can have as many as it must."""
    least = schema.get("minProperties")
    patterns = schema.get("patternProperties")
    return not isinstance(least, int | float) or least <= len(names) or bool(patterns)


def changed(schema: Json, keys: Sequence[Sequence[str]], change: Change) -> Json:
    """Return a copy in which the schemas under some keys are changed."""
    named, listed, single = keys
    shown = dict(schema)
    for key in named:
        if isinstance(parts := schema.get(key), dict):
            shown[key] = {name: change(part) for name, part in parts.items()}
    for key in listed:
        if isinstance(parts := schema.get(key), list):
            shown[key] = [change(part) for part in parts]
    for key in single:
        if isinstance(part := schema.get(key), dict):
            shown[key] = change(part)
    return shown


def _parts(schema: Json) -> Iterator[Json]:
    """Yield the schemas that describe the same value."""
    named, listed, single = PARTS
    found = [part for key in named for part in _mapping(schema.get(key)).values()]
    found += [part for key in listed for part in _list(schema.get(key))]
    found += [schema.get(key) for key in single]
    yield from (part for part in found if isinstance(part, dict))


def _mapping(value: Any) -> Json:
    return value if isinstance(value, dict) else {}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
