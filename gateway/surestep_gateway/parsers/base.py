"""The interface of parsers, and the search for markers that they share.

Text goes in, in pieces of any size, and events come out. The events, once coalesced, depend on the
text alone and not on the pieces. Text is never lost: what turns out to be neither reasoning nor a
call is content.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import groupby
from typing import ClassVar, NamedTuple, Protocol, TypeGuard

# Characters of white space in a row that may turn out to be layout. They are held back until that
# is decided, and looked at with every token; white space without an end is text.
MAX_LAYOUT = 1024


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


class Parser(Protocol):
    """Parses one output from its first piece to its end."""

    markers: ClassVar[tuple[str, ...]]  # read even where they are special tokens

    def push(self, text: str) -> list[Event]:
        """Return the events that `text` decides."""

    def finish(self) -> list[Event]:
        """Return the events of text that was still undecided, and the ends of what is still
        open.
        """


class ReasoningParser(Parser, Protocol):
    """Separates reasoning from content. A tool parser reads the content."""

    also_ends: tuple[str, ...]  # markers of content that end reasoning, besides its own
    answer: ClassVar[tuple[str, ...]]  # two tags that may stand around content, or none

    @property
    def reasoning(self) -> bool:
        """Return whether the text that comes next is reasoning."""

    @property
    def may_reason(self) -> bool:
        """Return whether reasoning may stand between here and the content."""

    @property
    def may_open(self) -> bool:
        """Return whether the marker of reasoning may come next."""


class StructuredParser(ReasoningParser, Protocol):
    """Parses an output that special tokens divide. It reads the calls as well.

    It holds headers back. Text among them is handed out before it is parsed, so that stop strings
    are looked for in it.
    """

    structure: ClassVar[tuple[str, ...]]  # the tokens that divide it, which are no text

    @property
    def in_header(self) -> bool:
        """Return whether the next text belongs to the structure, and not to the answer."""

    def hold(self, text: str) -> str:
        """Add text to the open header. Return what turns out to be no header, for `push`."""

    def divides(self, token: str) -> bool:
        """Return whether a token of `structure` ends a text or a header here. It is text if not."""

    def release(self, token: str | None) -> str:
        """Return text that was held back, as `token` or the end (None) decides, for `push`."""

    def mark(self, token: str) -> tuple[list[Event], str]:
        """Return the events that a dividing token decides once `release` was asked, and the text
        that was held back and follows it.
        """


def is_structured(parser: ReasoningParser | None) -> TypeGuard[StructuredParser]:
    """Return whether special tokens divide the output of a parser's model.

    A runtime-checkable protocol takes as long to tell as five tokens.
    """
    return hasattr(parser, "structure")


class PlainText:
    """Treats all text as content."""

    markers: ClassVar[tuple[str, ...]] = ()
    also_ends: tuple[str, ...] = ()
    answer: ClassVar[tuple[str, ...]] = ()
    reasoning = False
    may_reason = False
    may_open = False

    def push(self, text: str) -> list[Event]:
        return [Content(text)] if text else []

    def finish(self) -> list[Event]:
        return []


class ScanResult(NamedTuple):
    """Decision on a piece of text. Without a marker, `after` is empty."""

    before: str  # safe to use: no marker begins in it
    marker: str | None
    after: str


class MarkerScanner:
    """Finds the leftmost marker, the shortest where several begin there.

    Text that may be the start of a marker is held back until that is decided. After a match the
    scanner starts again.
    """

    def __init__(self, *markers: str) -> None:
        self._markers = markers
        self._first = frozenset(marker[0] for marker in markers)
        self._held = ""

    def push(self, text: str) -> ScanResult:
        """Add text and return what it decides."""
        if not self._held and self._first.isdisjoint(text):
            return ScanResult(text, None, "")
        window = self._held + text
        found = [(at, len(one), one) for one in self._markers if (at := window.find(one)) >= 0]
        if found:
            at, length, marker = min(found)
            self._held = ""
            return ScanResult(window[:at], marker, window[at + length :])
        safe = len(window) - max(overlap(window, marker) for marker in self._markers)
        self._held = window[safe:]
        return ScanResult(window[:safe], None, "")

    def flush(self) -> str:
        """Return the text held back for a marker that never came."""
        held, self._held = self._held, ""
        return held


def overlap(text: str, marker: str) -> int:
    """Return the length of the longest end of `text` that is a proper beginning of `marker`."""
    at = text.find(marker[0], max(0, len(text) - len(marker) + 1))
    while at >= 0:
        if marker.startswith(text[at:]):
            return len(text) - at
        at = text.find(marker[0], at + 1)
    return 0
