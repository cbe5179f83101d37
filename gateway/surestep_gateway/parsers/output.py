"""One output through both parsers: reasoning is set aside, calls are looked for in the content."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from .base import Parser, PlainText, ReasoningParser
from .events import Content, Event, ToolArguments, ToolCallEnd, ToolCallStart, coalesce


class OutputParser:
    """State of one output. The default parsers leave all text content."""

    def __init__(
        self,
        reasoning: ReasoningParser | None = None,
        tools: Parser | None = None,
        *,
        max_calls: int | None = None,
    ) -> None:
        """Calls after the first `max_calls` are left out."""
        self._reasoning = reasoning or PlainText()
        self._tools = tools or PlainText()
        self._max_calls = max_calls
        self.sets_reasoning_apart = reasoning is not None
        self.markers = self._reasoning.markers + self._tools.markers
        self.called = False  # whether the output calls a tool

    @property
    def reasoning(self) -> bool:
        """Whether the text that comes next is reasoning."""
        return self._reasoning.reasoning

    def push(self, text: str) -> list[Event]:
        """Events that `text` decides."""
        return self._kept(self._with_calls(self._reasoning.push(text)))

    def finish(self) -> list[Event]:
        """Events that the end of the output decides."""
        events = [*self._with_calls(self._reasoning.finish()), *self._tools.finish()]
        return self._kept(events)

    def _with_calls(self, events: Iterable[Event]) -> Iterator[Event]:
        for event in events:
            if isinstance(event, Content):
                yield from self._tools.push(event.text)
            else:
                yield event

    def _kept(self, events: Iterable[Event]) -> list[Event]:
        kept = coalesce(event for event in events if self._wanted(event))
        self.called = self.called or any(isinstance(event, ToolCallStart) for event in kept)
        return kept

    def _wanted(self, event: Event) -> bool:
        if self._max_calls is None or not isinstance(
            event, ToolCallStart | ToolArguments | ToolCallEnd
        ):
            return True
        return event.index < self._max_calls
