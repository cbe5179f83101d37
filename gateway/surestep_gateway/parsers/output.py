"""One output through both parsers: reasoning is separated, then calls are parsed in the content."""

from __future__ import annotations

from .base import Parser, PlainText, ReasoningParser, StructuredParser, is_structured
from .drafts import DraftedCalls
from .events import Content, Event, Reasoning, ToolArguments, ToolCallEnd, ToolCallStart
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
        self._structured: StructuredParser | None = reasoning if is_structured(reasoning) else None
        self.structure = self._structured.structure if self._structured is not None else ()
        self.sets_reasoning_apart = reasoning is not None
        self.called = False  # whether the output calls a tool

    @property
    def reasoning(self) -> bool:
        """Whether the text that comes next is reasoning."""
        return self._reasoning.reasoning

    @property
    def in_header(self) -> bool:
        """Whether the text that comes next belongs to the format, and not to the answer."""
        return self._structured is not None and self._structured.in_header

    def push(self, text: str) -> list[Event]:
        """Return the events that `text` decides; `coalesce` joins those of a stretch of text."""
        return self._with_calls(self._reasoning.push(text))

    def mark(self, token: str) -> list[Event]:
        """Return the events that a token of `structure` decides."""
        assert self._structured is not None, "a text parser has no structure"
        return self._allowed(self._structured.mark(token))

    def finish(self) -> list[Event]:
        """Return the events that the end of the output decides."""
        events = self._with_calls(self._reasoning.finish())
        if self._drafts is not None:
            text, calls = self._drafts.finish()
            events += [Reasoning(text), *self._allowed(calls)]
        return events if self._tools is None else events + self._allowed(self._tools.finish())

    def _with_calls(self, events: list[Event]) -> list[Event]:
        if self._tools is None:
            return events if self._structured is None else self._allowed(events)
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
