"""Run an output through both parsers: reasoning is separated, then calls are parsed in the content.

Calls in reasoning count if the output ends with them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable

from surestep_gateway.parsers.base import MarkerScanner

from .base import (
    MAX_LAYOUT,
    Content,
    Event,
    Parser,
    PlainText,
    Reasoning,
    ReasoningParser,
    StructuredParser,
    ToolArguments,
    ToolCallEnd,
    ToolCallStart,
    is_structured,
)
from .tools import MarkedToolParser


class OutputParser:
    """The state of one output. Without parsers all text is content."""

    def __init__(
        self,
        reasoning: ReasoningParser | None = None,
        tools: Parser | None = None,
        *,
        calls_in_reasoning: bool = False,
        max_calls: int | None = None,
    ) -> None:
        """With `calls_in_reasoning`, an output may end with calls before its reasoning does. Calls
        after the first `max_calls` are left out.
        """
        self._reasoning = reasoning or PlainText()
        self._tools = tools
        self._drafts: DraftedCalls | None = None
        if calls_in_reasoning and isinstance(tools, MarkedToolParser):
            self._drafts = DraftedCalls(tools)
        self._max_calls = max_calls
        self.markers = self._reasoning.markers + (tools.markers if tools is not None else ())
        self.structured: StructuredParser | None = reasoning if is_structured(reasoning) else None
        self.structure = self.structured.structure if self.structured is not None else ()
        self.sets_reasoning_apart = reasoning is not None
        self.called = False  # whether the output calls a tool

    @property
    def reasoning(self) -> bool:
        """Return whether the text that comes next is reasoning."""
        return self._reasoning.reasoning

    def push(self, text: str) -> list[Event]:
        """Return the events that `text` decides; `coalesce` joins those of a stretch of text."""
        return self._with_calls(self._reasoning.push(text))

    def mark(self, token: str) -> tuple[list[Event], str]:
        """Return the events that a dividing token decides, and the text that follows them."""
        assert self.structured is not None, "a text parser has no structure"
        events, text = self.structured.mark(token)
        return self._allowed(events), text

    def finish(self) -> list[Event]:
        """Return the events that the end of the output decides."""
        events = self._with_calls(self._reasoning.finish())
        if self._drafts is not None:
            text, calls = self._drafts.finish()
            events += [Reasoning(text), *self._allowed(calls)]
        return events if self._tools is None else events + self._allowed(self._tools.finish())

    def _with_calls(self, events: list[Event]) -> list[Event]:
        if self._tools is None:
            return events if self.structured is None else self._allowed(events)
        found: list[Event] = []
        for event in events:
            if isinstance(event, Content):
                if self._drafts is not None and event.text.strip():
                    found.append(Reasoning(self._drafts.release()))
                found += self._tools.push(event.text)
            elif self._drafts is not None and isinstance(event, Reasoning):
                found.append(Reasoning(self._drafts.push(event.text)))
            else:
                found.append(event)
        return self._allowed(found)

    def _allowed(self, events: list[Event]) -> list[Event]:
        self.called = self.called or any(isinstance(event, ToolCallStart) for event in events)
        if self._max_calls is None:
            return events
        calls = (ToolCallStart, ToolArguments, ToolCallEnd)
        return [e for e in events if not isinstance(e, calls) or e.index < self._max_calls]


class DraftedCalls:
    """Holds calls back that stand in reasoning, until it is clear what they are.

    Models forget to end their reasoning before they call. They also draft calls, and think on. A
    call counts if nothing but white space and the end of the reasoning comes behind it.
    """

    def __init__(self, calls: MarkedToolParser) -> None:
        """`calls` is the parser of calls in content."""
        self._new = calls.again
        self._scanner = MarkerScanner(*calls.drafted)
        self._newlines = ""  # in front of the draft, perhaps
        self._draft: MarkedToolParser | None = None
        self._text: list[str] = []  # of the draft
        self._calls: list[Event] = []

    def push(self, text: str) -> str:
        """Return the reasoning that more text of it decides."""
        told = ""
        while text:
            if self._draft is None:
                found = self._scanner.push(text)
                known = self._newlines + found.before
                body = known[: max(len(known.rstrip("\n")), len(known) - MAX_LAYOUT)]
                self._newlines = known[len(body) :]
                told += body
                text = found.after
                if found.marker is not None:
                    self._begin()
                    text = found.marker + text
            else:
                read = self._read(self._draft, text)
                if read < len(text):
                    told += self.release()
                text = text[read:]
        return told

    def release(self) -> str:
        """Return what was held back, and is reasoning."""
        text = self._newlines + "".join(self._text) + self._scanner.flush()
        self._newlines, self._draft, self._text, self._calls = "", None, [], []
        return text

    def finish(self) -> tuple[str, list[Event]]:
        """Return the rest of the reasoning, and the calls behind it."""
        calls: list[Event] = []
        if self._draft is not None:
            calls = [*self._calls, *self._draft.finish()]
        if any(map(_is_text, calls)) or not _are_whole(calls):
            return self.release(), []
        return "", [event for event in calls if not isinstance(event, Content)]

    def _begin(self) -> None:
        self._draft, self._text, self._calls = self._new(), [], []

    def _read(self, draft: MarkedToolParser, text: str) -> int:
        """Return how many characters belong to the draft."""
        for at, char in enumerate(text):
            events = draft.push(char)
            if any(map(_is_text, events)):
                return at  # the character may begin another draft
            self._text.append(char)
            self._calls += events
        return len(text)


def _is_text(event: Event) -> bool:
    return isinstance(event, Content) and not event.text.isspace() and bool(event.text)


def _are_whole(events: Iterable[Event]) -> bool:
    """Return whether there are calls, whose arguments are objects."""
    arguments: dict[int, str] = {}
    for event in events:
        if isinstance(event, ToolCallStart):
            arguments[event.index] = ""
        elif isinstance(event, ToolArguments):
            arguments[event.index] += event.text
    try:
        return bool(arguments) and all(
            isinstance(json.loads(text), dict) for text in arguments.values()
        )
    except (ValueError, RecursionError):
        return False
