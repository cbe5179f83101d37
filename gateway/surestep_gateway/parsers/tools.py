"""Tool calls between markers, such as `<tool_call>` and `</tool_call>`, among text.

The text between the markers is read by a grammar: a generator that is sent one character at a time
and returns after the closing marker. So it cannot matter how the text was cut into pieces. Until a
call is announced it may turn out to be none; its text is then content. Once announced, the call
stands, and text that its grammar does not accept is content beside it.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping
from typing import Any, ClassVar, TypeVar

from .base import MAX_LAYOUT
from .events import Content, Event, ToolArguments, ToolCallEnd, ToolCallStart
from .schema import Types, json_text
from .stop_strings import MarkerScanner

OPEN, CLOSE = "<tool_call>", "</tool_call>"
SPACE = " \t\r\n"
_T = TypeVar("_T")
Steps = Generator[None, str, _T]
Take = Callable[[str], None]
Schemas = Mapping[str, Mapping[str, Any]]  # of the parameters, by the name of the function


class Malformed(Exception):
    """The text is no call. Grammars raise it before they announce a call, never after."""


class MarkedToolParser(ABC):
    """Finds calls; subclasses parse them. White space around calls is layout."""

    markers: ClassVar[tuple[str, ...]] = (OPEN, CLOSE)
    begins: ClassVar[tuple[str, ...]] = (OPEN,)  # of the markers, those that begin calls

    def __init__(self) -> None:
        self._events: list[Event] = []
        self._scanner = MarkerScanner(*self.begins)
        self._space = ""  # end of the content so far, or layout: the next text decides
        self._after_call = False
        self._call: Steps[None] | None = None
        self._call_text: list[str] = []  # of the open call so far
        self._announced = False
        self._index = -1  # of the latest call

    def push(self, text: str) -> list[Event]:
        while text:
            text = self._read_content(text) if self._call is None else self._read_call(text)
        return self._take_events()

    def finish(self) -> list[Event]:
        if self._call is None:
            self._add_content(self._scanner.flush())
        elif self._announced:
            self._call.close()  # a grammar may still emit events
            self._end_call()
        else:
            self._give_up()
        if not self._after_call:
            self._events.append(Content(self._space))
        return self._take_events()

    @abstractmethod
    def _grammar(self) -> Steps[None]:
        """Read one call, from behind the opening marker to behind the closing one.

        The opening one is `self._call_text[0]`.
        """

    def _announce(self, name: str) -> None:
        self._announced = True
        self._space = ""
        self._index += 1
        self._events.append(ToolCallStart(self._index, name))

    def _argue(self, text: str) -> None:
        self._events.append(ToolArguments(self._index, text))

    def _skip_to(self, *ends: str, layout: str, begin: str = "") -> Steps[str]:
        """Read up to one of `ends`, which is returned. Anything but `layout` is content."""
        scanner = MarkerScanner(*ends)
        found = scanner.push(begin)
        blank = True
        while found.marker is None:
            found = scanner.push((yield))
            text = found.before.lstrip(layout) if blank else found.before
            blank = blank and not text
            self._events.append(Content(text))
        return found.marker

    def _read_content(self, text: str) -> str:
        """Return the text left to read."""
        found = self._scanner.push(text)
        self._add_content(found.before)
        if found.marker is not None:
            self._begin(found.marker)
        return found.after

    def _begin(self, marker: str) -> None:
        self._call_text = [marker]
        self._announced = False
        self._call = self._grammar()
        next(self._call)

    def _add_content(self, text: str) -> None:
        text = self._space + text
        body = text[: max(len(text.rstrip()), len(text) - MAX_LAYOUT)]
        self._space = text[len(body) :]
        if body:
            self._after_call = False
            self._events.append(Content(body))

    def _read_call(self, text: str) -> str:
        """Return the text left to read."""
        assert self._call is not None
        for at, char in enumerate(text):
            try:
                self._call.send(char)
            except StopIteration:
                self._end_call()
                return text[at + 1 :]
            except Malformed:
                self._give_up()
                return text[at:]  # the character may begin a marker
            self._call_text.append(char)
        return ""

    def _end_call(self) -> None:
        self._call = None
        self._after_call = True
        self._events.append(ToolCallEnd(self._index))

    def _give_up(self) -> None:
        assert not self._announced, "an announced call stands"
        self._call = None
        self._add_content("".join(self._call_text))

    def _take_events(self) -> list[Event]:
        events, self._events = self._events, []
        return events


class TypedToolParser(MarkedToolParser):
    """Finds calls whose arguments are bare text: the schema of the tool tells its type."""

    def __init__(self, schemas: Schemas) -> None:
        super().__init__()
        self._schemas = schemas

    def _argue_string(self, text: str) -> None:
        """Emit part of a JSON string."""
        self._argue(json.dumps(text, ensure_ascii=False)[1:-1])

    def _argue_typed(self, types: Types, read: Callable[[Take], Steps[Any]]) -> Steps[None]:
        """Read a value and emit it as JSON of one of `types`, or as a string."""
        if types <= {"string"}:  # such a value can be passed on while it is written
            self._argue('"')
            yield from read(self._argue_string)
            self._argue('"')
            return
        parts: list[str] = []
        try:
            yield from read(parts.append)
        finally:  # also where the output ends in the middle
            self._argue(json_text("".join(parts), types))


def require(condition: bool) -> None:
    """Raise Malformed unless the condition holds."""
    if not condition:
        raise Malformed


def nonspace() -> Steps[str]:
    """Return the next character that is not white space."""
    while (char := (yield)).isspace():
        pass
    return char


def literal(*texts: str, begin: str = "") -> Steps[str]:
    """Read exactly one of `texts`, after white space, and return it. Raise Malformed.

    `begin` was read too much.
    """
    read = begin or (yield from nonspace())
    while read not in texts:
        require(any(text.startswith(read) for text in texts))
        read += yield
    return read


def read_to(take: Take, *markers: str, begin: str = "") -> Steps[str]:
    """Pass on the text before one of `markers`, and return the text. `begin` was read too much."""
    scanner = MarkerScanner(*markers)
    found = scanner.push(begin)
    texts = [found.before]
    take(found.before)
    try:
        while found.marker is None:
            found = scanner.push((yield))
            take(found.before)
            texts.append(found.before)
    finally:  # also where the output ends in the middle
        take(scanner.flush())
    return "".join(texts)


def printable_to(marker: str) -> Steps[str]:
    """Return the text before `marker`, without white space around. Raise Malformed."""
    text = yield from read_to(lambda part: require(part.isprintable()), marker)
    require(bool(text.strip()))
    return text.strip()


def json_object(take: Take) -> Steps[str]:
    """Pass on the characters of an object whose brace was read, up to the one that closes it.

    Brackets are counted and nothing more is checked: clients may be able to repair a model's
    mistake. A `<` outside of strings cannot be JSON, so it ends the object too and is returned.
    """
    take("{")
    depth, in_string, escaped = 1, False, False
    while depth:
        char = yield
        if in_string:
            in_string = escaped or char != '"'
            escaped = char == "\\" and not escaped
        elif char == "<":
            return char
        else:
            in_string = char == '"'
            depth += (char in "{[") - (char in "]}")
        take(char)
    return ""
