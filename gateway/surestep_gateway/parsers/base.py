"""The interface of parsers: text goes in, in pieces of any size, and events come out.

The events, once coalesced, depend on the text alone and not on the pieces. Text is never lost: what
turns out to be neither reasoning nor a call is content.
"""

from __future__ import annotations

from typing import ClassVar, Protocol, TypeGuard

from .events import Content, Event

# Characters of white space in a row that may turn out to be layout. They are held back until that
# is decided, and looked at with every token; white space without an end is text.
MAX_LAYOUT = 1024


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

    @property
    def reasoning(self) -> bool:
        """Whether the text that comes next is reasoning."""

    @property
    def may_reason(self) -> bool:
        """Whether reasoning may stand between here and the content."""


class StructuredParser(ReasoningParser, Protocol):
    """Parses an output that special tokens divide. It reads the calls as well."""

    structure: ClassVar[tuple[str, ...]]  # the tokens that divide it, which are no text

    @property
    def in_header(self) -> bool:
        """Whether the text that comes next belongs to the structure, and not to the answer."""

    def mark(self, token: str) -> list[Event]:
        """Return the events that a token of `structure` decides."""


def is_structured(parser: ReasoningParser | None) -> TypeGuard[StructuredParser]:
    """Return whether special tokens divide the output of a parser's model.

    A runtime-checkable protocol takes as long to tell as five tokens.
    """
    return hasattr(parser, "structure")


class PlainText:
    """Treats all text as content."""

    markers: ClassVar[tuple[str, ...]] = ()
    also_ends: tuple[str, ...] = ()
    reasoning = False
    may_reason = False

    def push(self, text: str) -> list[Event]:
        return [Content(text)] if text else []

    def finish(self) -> list[Event]:
        return []
