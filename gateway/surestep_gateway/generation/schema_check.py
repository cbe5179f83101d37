"""Checks of finished answers whose grammar is wider than the client's schema."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, NamedTuple

from surestep_common.errors import SurestepError

from surestep_gateway.parsers import Content, Event, ToolArguments, ToolCallStart

CONTENT = ""  # the name of the schema of the content, among those of functions

Promised = Mapping[str, bytes]  # schemas with their fields, as JSON, by names of functions
Violations = list[dict[str, Any]]


class Written(NamedTuple):
    """A text that must be as a schema says; `call` is the index of the call it belongs to."""

    name: str  # of the schema
    text: bytearray
    call: int | None


Ask = Callable[[Promised, Sequence[Written]], Awaitable[Violations]]


class Checks:
    """The checks of one request, one at a time. Behind one that fails or takes too much there is
    none: each would end a text process.
    """

    def __init__(self, promised: Promised, ask: Ask) -> None:
        """`ask` returns the violations of schemas in texts. It may raise SurestepError."""
        self.promised, self._ask = promised, ask
        self._turn = asyncio.Lock()
        self._fault: str | None = None

    async def violations(self, written: Sequence[Written]) -> Violations:
        """Return where texts violate their schemas; a check that fails is one that says so."""
        async with self._turn:
            if self._fault is None:
                try:
                    return await self._ask(self.promised, written)
                except SurestepError as error:
                    self._fault = f"it could not be checked: {error.message}"
        return [{"tool_call": None, "path": "$", "message": self._fault}]


class SchemaCheck:
    """The texts of one sequence that were promised to be as schemas say."""

    def __init__(self, checks: Checks) -> None:
        self._checks, self._promised = checks, checks.promised
        self._content = bytearray()
        self._calls = dict[int, Written]()

    def add(self, events: Sequence[Event]) -> None:
        """Take in what was written."""
        for event in events:
            match event:
                case Content(text) if CONTENT in self._promised:
                    self._content += text.encode()
                case ToolCallStart(index, name):
                    self._calls[index] = Written(name, bytearray(), index)
                case ToolArguments(index, text) if self._calls[index].name in self._promised:
                    self._calls[index].text.extend(text.encode())

    async def violations(self) -> Violations:
        """Return the violations in an output that is over."""
        asked = [call for call in self._calls.values() if call.name in self._promised]
        # Content may be there in place of calls.
        if CONTENT in self._promised and (self._content or not self._calls):
            asked.append(Written(CONTENT, self._content, None))
        return await self._checks.violations(asked) if asked else []
