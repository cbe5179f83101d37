"""Tool calls within reasoning.

Models forget to end their reasoning before they call. They also draft calls, and think on. A call
counts if nothing but white space and the end of the reasoning comes behind it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable

from .base import MAX_LAYOUT
from .events import Content, Event, ToolArguments, ToolCallStart
from .stop_strings import MarkerScanner
from .tools import MarkedToolParser


class DraftedCalls:
    """Holds calls back that stand in reasoning, until it is clear what they are."""

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
