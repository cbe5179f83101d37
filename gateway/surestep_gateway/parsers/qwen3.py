"""Reasoning between `<think>` and `</think>`, as Qwen3, DeepSeek, GLM and others write it, and
between `[THINK]` and `[/THINK]` as Mistral does.

Qwen3 writes `<think>` itself. The templates of its successors put it into the prompt, so that the
output begins inside the reasoning; with `enable_thinking` off they put an empty pair there, so that
it begins after it. The end of the prompt shows which. Newlines beside a marker are layout, as they
are for the templates.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import ClassVar

from surestep_gateway.parsers.base import MarkerScanner

from .base import MAX_LAYOUT, Content, Event, Reasoning

_OPEN, CLOSE_THOUGHT = "<think>", "</think>"


class _State(Enum):
    START = auto()  # `<think>` may follow
    REASONING = auto()
    CONTENT = auto()


class ThoughtParser:
    """Starts in the state in which `prompt` ends."""

    markers: ClassVar[tuple[str, ...]] = (_OPEN, CLOSE_THOUGHT)

    def __init__(
        self, prompt: str, *, also_ends: tuple[str, ...] = (), reasons: bool = False
    ) -> None:
        """`also_ends` are markers that end reasoning and begin content. With `reasons`, what
        begins without `<think>` is reasoning.
        """
        self.also_ends = also_ends
        self._unmarked = _State.REASONING if reasons else _State.CONTENT
        self._state = self._initial(prompt)
        self._scanner = MarkerScanner(self.markers[1], *also_ends)
        self._held = ""  # at the start: possibly `<think>`; in the reasoning: newlines
        self._skip_newlines = self._state is not _State.START

    @property
    def reasoning(self) -> bool:
        begun = self._unmarked if self._state is _State.START else self._state
        return begun is _State.REASONING

    @property
    def may_reason(self) -> bool:
        return self._state is not _State.CONTENT

    def push(self, text: str) -> list[Event]:
        match self._state:
            case _State.START:
                return self._push_start(text)
            case _State.REASONING:
                return self._push_reasoning(text)
            case _State.CONTENT:
                return self._push_content(text)

    def finish(self) -> list[Event]:
        held, self._held = self._held, ""
        if not self.reasoning:
            return [Content(held)]
        return [Reasoning(held + self._scanner.flush())]

    def _push_start(self, text: str) -> list[Event]:
        self._held += text
        begin, opened = self._held.lstrip(), self.markers[0]
        if len(self._held) - len(begin) <= MAX_LAYOUT and opened.startswith(begin[: len(opened)]):
            if len(begin) < len(opened):
                return []
            self._held, self._skip_newlines = "", True
            self._state = _State.REASONING
            return self._push_reasoning(begin[len(opened) :])
        held, self._held = self._held, ""
        self._state = self._unmarked
        if self._state is _State.CONTENT:
            return self._push_content(held)
        self._skip_newlines = True
        return self._push_reasoning(held)

    def _push_reasoning(self, text: str) -> list[Event]:
        found = self._scanner.push(text)
        thought = self._held + self._skipped(found.before)
        body = thought[: max(len(thought.rstrip("\n")), len(thought) - MAX_LAYOUT)]
        self._held = thought[len(body) :]
        events: list[Event] = [Reasoning(body)]
        if found.marker is not None:
            self._held, self._skip_newlines = "", True
            self._state = _State.CONTENT
            begins = found.marker if found.marker in self.also_ends else ""
            events += self._push_content(begins + found.after)
        return events

    def _push_content(self, text: str) -> list[Event]:
        return [Content(self._skipped(text))]

    def _skipped(self, text: str) -> str:
        if not self._skip_newlines:
            return text
        text = text.lstrip("\n")
        self._skip_newlines = not text
        return text

    def _initial(self, prompt: str) -> _State:
        opened, closed = self.markers
        end = prompt.rstrip()
        if end.endswith(opened):
            return _State.REASONING
        return _State.CONTENT if end.endswith(closed) else _State.START


class MistralThoughtParser(ThoughtParser):
    """Reads what Magistral and Ministral write, between markers of their own."""

    markers: ClassVar[tuple[str, ...]] = ("[THINK]", "[/THINK]")
