"""This release, and messages of a peer of another one, which may say what it does not know."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet

from .errors import Unimplemented


def package_version() -> str:
    """Return the version of the installed distribution, or a stand-in for a source tree."""
    try:
        return version("surestep")
    except PackageNotFoundError:
        return "0+source"


def name_of(kind: Any, value: int) -> str:
    """Return the name of an enum's value, or the number of a value unknown to this release."""
    return kind.Name(value) if value in kind.values() else str(value)


def unknown_fields(message: Message, prefix: str = "") -> Iterator[str]:
    """Yield the fields that this release does not know, of the message and of those in it."""
    numbers = {field.field_number for field in UnknownFieldSet(message)}  # type: ignore[attr-defined]  # stubs
    yield from (f"{prefix}field {number}" for number in sorted(numbers))
    for field, value in message.ListFields():
        if field.message_type is None or field.message_type.GetOptions().map_entry:
            continue
        for part in value if field.is_repeated else (value,):
            yield from unknown_fields(part, f"{prefix}{field.name}.")


def refuse_unknown(message: Message) -> None:
    """Raise Unimplemented if anything is asked for that this release cannot even read."""
    if names := list(unknown_fields(message)):
        what = message.DESCRIPTOR.name
        raise Unimplemented(f"{what}: this release does not know {', '.join(names)}")
