"""The events into which a model's text is parsed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import groupby


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text of the model's reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class Content:
    """Text of the model's answer."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    """A function call begins; `index` counts the calls of one output from 0."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class ToolArguments:
    """More of the JSON text of a call's arguments."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class ToolCallEnd:
    """The call is complete."""

    index: int


Event = Reasoning | Content | ToolCallStart | ToolArguments | ToolCallEnd
_TEXTS = (Reasoning, Content, ToolArguments)


def coalesce(events: Iterable[Event]) -> list[Event]:
    """Join neighbouring texts of one kind and drop empty ones."""
    present = [event for event in events if not isinstance(event, _TEXTS) or event.text]
    if len(present) < 2:
        return present
    joined: list[Event] = []
    for _, run in groupby(present, key=_kind):
        first, *rest = run
        if isinstance(first, _TEXTS) and rest:
            texts = [first.text, *(one.text for one in rest if isinstance(one, _TEXTS))]
            first = replace(first, text="".join(texts))
        joined.append(first)
    return joined


def content_of(events: Iterable[Event]) -> str:
    """Return the content among the events."""
    return "".join(event.text for event in events if isinstance(event, Content))


def _kind(event: Event) -> tuple[type[Event], int]:
    return type(event), getattr(event, "index", 0)
