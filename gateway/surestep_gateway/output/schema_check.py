"""Checks of finished answers whose grammar is wider than the client's schema."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, NamedTuple

from surestep_gateway.parsers import Content, Event, ToolArguments, ToolCallStart

CONTENT = ""  # the name of the schema of the content, among those of functions

Promised = Mapping[str, bytes]  # schemas with their fields, as JSON, by names of functions
Violations = list[dict[str, Any]]


class Written(NamedTuple):
    """A text that must be as its schema says; `call` is the index of the call it belongs to."""

    promised: bytes
    text: str
    call: int | None


Ask = Callable[[Sequence[Written]], Awaitable[Violations]]


class SchemaCheck:
    """What one sequence has written of what was promised."""

    def __init__(self, promised: Promised, ask: Ask) -> None:
        """`ask` returns the violations in texts, and does not fail."""
        self._promised, self._ask = promised, ask
        self._content: list[str] = []
        self._calls = dict[int, list[str]]()  # the name, then pieces of the arguments

    def add(self, events: Sequence[Event]) -> None:
        """Take in what was written."""
        for event in events:
            match event:
                case Content(text):
                    self._content.append(text)
                case ToolCallStart(index, name):
                    self._calls[index] = [name]
                case ToolArguments(index, text):
                    self._calls[index].append(text)

    async def violations(self) -> Violations:
        """Return the violations in an output that is over."""
        asked = [
            Written(self._promised[name], "".join(pieces), index)
            for index, (name, *pieces) in self._calls.items()
            if name in self._promised
        ]
        # Content may be there in place of calls.
        if CONTENT in self._promised and (self._content or not self._calls):
            asked.append(Written(self._promised[CONTENT], "".join(self._content), None))
        return await self._ask(asked) if asked else []
