"""Reasoning between `<think>` and `</think>`, as Qwen3, DeepSeek, GLM and others write it, and
between markers of their own, as Mistral, Seed-OSS and Granite do.

Qwen3 writes `<think>` itself. The templates of its successors put it into the prompt, so that the
output begins inside the reasoning; with `enable_thinking` off they put an empty pair there, so that
it begins after it. The end of the prompt shows which. Newlines beside a marker are layout, as they
are for the templates. Hunyuan and Ernie put their answers between tags as well.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import ClassVar

from surestep_gateway.parsers.base import MarkerScanner

from .base import MAX_LAYOUT, Content, Event, Reasoning, overlap

_OPEN, CLOSE_THOUGHT = "<think>", "</think>"


class _State(Enum):
    START = auto()  # `<think>` may follow
    REASONING = auto()
    CONTENT = auto()


class ThoughtParser:
    """Starts in the state in which `prompt` ends."""

    markers: ClassVar[tuple[str, ...]] = (_OPEN, CLOSE_THOUGHT)
    misspelt: ClassVar[tuple[str, ...]] = ()  # as models write these two at times
    layout: ClassVar[str] = "\n"  # characters that are, beside a marker
    answer: ClassVar[tuple[str, ...]] = ()

    def __init__(
        self, prompt: str, *, also_ends: tuple[str, ...] = (), reasons: bool = False
    ) -> None:
        """`also_ends` are markers that end reasoning and begin content. With `reasons`, what
        begins without `<think>` is reasoning.
        """
        self.also_ends = also_ends
        self._unmarked = _State.REASONING if reasons else _State.CONTENT
        self._opens = self.markers[:1] + self.misspelt[:1]
        self._closes = self.markers[1:] + self.misspelt[1:]
        self._state = self._initial(prompt)
        self._scanner = MarkerScanner(*self._closes, *also_ends)
        self._held = ""  # at the start: possibly `<think>`; in the reasoning: newlines
        self._skip_layout = self._state is not _State.START

    @property
    def reasoning(self) -> bool:
        begun = self._unmarked if self._state is _State.START else self._state
        return begun is _State.REASONING

    @property
    def may_reason(self) -> bool:
        return self._state is not _State.CONTENT

    @property
    def may_open(self) -> bool:
        return self._state is _State.START

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
        begin = self._held.lstrip()
        if len(self._held) - len(begin) <= MAX_LAYOUT:
            for opened in filter(begin.startswith, self._opens):
                self._held, self._skip_layout = "", True
                self._state = _State.REASONING
                return self._push_reasoning(begin[len(opened) :])
            if any(opened.startswith(begin) for opened in self._opens):
                return []
        held, self._held = self._held, ""
        self._state = self._unmarked
        if self._state is _State.CONTENT:
            return self._push_content(held)
        self._skip_layout = True
        return self._push_reasoning(held)

    def _push_reasoning(self, text: str) -> list[Event]:
        found = self._scanner.push(text)
        thought = self._held + self._skipped(found.before)
        body = thought[: max(len(thought.rstrip(self.layout)), len(thought) - MAX_LAYOUT)]
        self._held = thought[len(body) :]
        events: list[Event] = [Reasoning(body)]
        if found.marker is not None:
            self._held, self._skip_layout = "", True
            self._state = _State.CONTENT
            begins = found.marker if found.marker in self.also_ends else ""
            events += self._push_content(begins + found.after)
        return events

    def _push_content(self, text: str) -> list[Event]:
        return [Content(self._skipped(text))]

    def _skipped(self, text: str) -> str:
        if not self._skip_layout:
            return text
        text = text.lstrip(self.layout)
        self._skip_layout = not text
        return text

    def _initial(self, prompt: str) -> _State:
        end = prompt.rstrip()
        if end.endswith(self._opens):
            return _State.REASONING
        return _State.CONTENT if end.endswith(self._closes) else _State.START


class MistralThoughtParser(ThoughtParser):
    """Reads what Magistral and Ministral write, between markers of their own."""

    markers: ClassVar[tuple[str, ...]] = ("[THINK]", "[/THINK]")


class SeedOssThoughtParser(ThoughtParser):
    markers: ClassVar[tuple[str, ...]] = ("<seed:think>", "</seed:think>")


class GraniteThoughtParser(ThoughtParser):
    """Reads what Granite 3.2 and 3.3 write, whose markers are sentences."""

    markers: ClassVar[tuple[str, ...]] = ("Here is my thought process:", "Here is my response:")
    misspelt = ("Here's my thought process:", "Here's my response:")
    layout = " \n"


class TaggedAnswerParser(ThoughtParser):
    """Reads an answer between tags of its own, of which the second ends the output."""

    def __init__(self, prompt: str, *, reasons: bool = False) -> None:
        super().__init__(prompt, reasons=reasons)
        self._lead = ""  # of the content: possibly the first tag
        self._tagged: bool | None = None  # whether it was; None: undecided
        self._end = ""  # of the content: possibly the second tag, and layout

    def finish(self) -> list[Event]:
        ended = self.answer[1] in self._end
        rest = self._lead if self._tagged is None else self._end * (not ended)
        return [*super().finish(), *super()._push_content(rest)]

    def _push_content(self, text: str) -> list[Event]:
        if self._tagged is None:
            self._lead += text
            begin, tag = self._lead.lstrip(), self.answer[0]
            if begin.startswith(tag):
                self._tagged, self._skip_layout = True, True
                text = begin[len(tag) :]
            elif tag.startswith(begin) and len(self._lead) - len(begin) <= MAX_LAYOUT:
                return []
            else:
                self._tagged, text = False, self._lead
        return super()._push_content(self._before_end(text) if self._tagged else text)

    def _before_end(self, text: str) -> str:
        """Return the text that is neither the second tag nor layout beside it."""
        text, tag = self._end + text, self.answer[1]
        at = text.rfind(tag)
        behind = text[at + len(tag) :]
        if at < 0 or behind.strip() or len(behind) > MAX_LAYOUT:
            at = len(text) - overlap(text, tag)
        known = max(len(text[:at].rstrip(self.layout)), at - MAX_LAYOUT)
        self._end = text[known:]
        return text[:known]


class HunyuanThoughtParser(TaggedAnswerParser):
    answer: ClassVar[tuple[str, ...]] = ("<answer>", "</answer>")


class ErnieThoughtParser(TaggedAnswerParser):
    answer: ClassVar[tuple[str, ...]] = ("<response>", "</response>")
