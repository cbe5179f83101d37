"""Texts for the parsers, and the ways to feed them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any

from surestep_gateway.parsers import (
    REASONING_PARSERS,
    TOOL_PARSERS,
    Content,
    Event,
    OutputParser,
    ToolArguments,
    ToolCallStart,
    coalesce,
)

SCHEMAS: dict[str, dict[str, Any]] = {
    "weather": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    },
    "book": {
        "type": "object",
        "properties": {"guests": {"type": "array"}, "note": {"type": "string"}},
    },
}


def output_parser(
    tools: str | None = None,
    *,
    reasoning: str | None = None,
    prompt: str = "<think>\n",
    tools_of: dict[str, dict[str, Any]] = SCHEMAS,
) -> OutputParser:
    """Parsers by their names, for the tools of a request."""
    return OutputParser(
        REASONING_PARSERS.get(reasoning)(prompt, tools_of) if reasoning else None,
        TOOL_PARSERS.get(tools)(tools_of) if tools else None,
        calls_in_reasoning=True,
    )


def parse(parser: OutputParser, pieces: Iterable[str]) -> list[Event]:
    """All events of an output that arrives in `pieces`."""
    events = [event for piece in pieces for event in parser.push(piece)]
    return coalesce([*events, *parser.finish()])


def all_partitions(tokens: Sequence[str]) -> Iterator[list[str]]:
    """Every way to join neighbours."""
    for cuts in range(1 << (len(tokens) - 1)):
        edges = [0, *(at for at in range(1, len(tokens)) if cuts >> (at - 1) & 1), len(tokens)]
        yield ["".join(tokens[begin:end]) for begin, end in pairwise(edges)]


def calls_of(events: Iterable[Event]) -> list[tuple[str, str]]:
    """Name and arguments of each call."""
    found: list[tuple[str, str]] = []
    for event in events:
        if isinstance(event, ToolCallStart):
            found.append((event.name, ""))
        elif isinstance(event, ToolArguments):
            name, text = found[event.index]
            found[event.index] = (name, text + event.text)
    return found


def contents_of(events: Iterable[Event]) -> list[str]:
    """The runs of content."""
    return [event.text for event in events if isinstance(event, Content)]


def words(text: str) -> list[str]:
    """Return the numbered words that tests put between the parts of an output."""
    return re.findall(r"w\d+\.", text)


def said(event: Event) -> str:
    """Return the text of an event: of a call's start the function's name."""
    if isinstance(event, ToolCallStart):
        return event.name
    return getattr(event, "text", "")


def partitions(ids: Sequence[int], cuts: Sequence[int]) -> Iterator[list[int]]:
    """`ids` cut into runs at the given places."""
    edges = [0, *sorted({cut for cut in cuts if 0 < cut < len(ids)}), len(ids)]
    for begin, end in pairwise(edges):
        yield list(ids[begin:end])
