"""Tool calls between markers, such as `<tool_call>` and `</tool_call>`, among text.

The text behind a marker is read by a grammar: a generator that is sent one character at a time and
returns behind the last call that it finds. So it cannot matter how the text was cut into pieces.
Until a call is announced it may turn out to be none; its text is then content. Once announced, the
call stands, and text that its grammar does not accept is content beside it.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Self, TypeVar

from surestep_gateway.parsers.base import MarkerScanner

from .base import MAX_LAYOUT, Content, Event, ToolArguments, ToolCallEnd, ToolCallStart
from .schema import Types, json_text
from .steps import AT_END, EndOfText, Malformed, Steps, Take, read_to

_T = TypeVar("_T")
OPEN, CLOSE = "<tool_call>", "</tool_call>"
Schemas = Mapping[str, Mapping[str, Any]]  # of the parameters, by the name of the function


class MarkedToolParser(ABC):
    """Finds calls; subclasses parse them. White space around calls is layout."""

    markers: ClassVar[tuple[str, ...]] = (OPEN, CLOSE)
    begins: ClassVar[tuple[str, ...]] = (OPEN,)  # texts that calls begin with

    @property
    def drafted(self) -> tuple[str, ...]:
        """The texts that calls in reasoning begin with."""
        return self.begins

    def __init__(self, schemas: Schemas) -> None:
        self._schemas = schemas
        self._events: list[Event] = []
        self._scanner = MarkerScanner(*self.begins)
        self._space = ""  # end of the content so far, or layout: the next text decides
        self._after_call = False
        self._call: Steps[None] | None = None
        # What was read since the call began, or since its latest argument: content if it is none.
        self._call_text: list[str] = []
        self._announced = False
        self._index = -1  # of the latest call

    def again(self) -> Self:
        """Return a parser of another text."""
        return type(self)(self._schemas)

    def push(self, text: str) -> list[Event]:
        while text:
            text = self._read_content(text) if self._call is None else self._read_call(text)
        return self._take_events()

    def finish(self) -> list[Event]:
        if self._call is None:
            self._add_content(self._scanner.flush())
        elif self._announced:
            self._finish_call(self._call)
        else:
            self._give_up()
        if not self._after_call:
            self._events.append(Content(self._space))
        return self._take_events()

    @abstractmethod
    def _grammar(self) -> Steps[None]:
        """Read a call, or several, from behind the text that began it.

        That text is `self._call_text[0]`.
        """

    def _announce(self, name: str) -> None:
        self._announced = True
        self._space = ""
        self._index += 1
        self._call_text.clear()
        self._events.append(ToolCallStart(self._index, name))

    def _argue(self, text: str) -> None:
        self._call_text.clear()
        self._events.append(ToolArguments(self._index, text))

    def _next_call(self, marker: str = "") -> None:
        """End the call. What comes behind `marker`, which was read, may be another."""
        self._end_call()
        self._call_text = [marker] if marker else []

    def _skip_to(
        self, *ends: str, layout: str, begin: str = "", at_end: bool = False
    ) -> Steps[str]:
        """Read up to one of `ends`, which is returned. Anything but `layout` is content.

        `begin` was read too much. With `at_end`, the end of the output may stand for one of them.
        """
        scanner = MarkerScanner(*ends)
        found = scanner.push(begin)
        blank = True
        while True:
            text = found.before.lstrip(layout) if blank else found.before
            blank = blank and not text
            self._events.append(Content(text))
            if found.marker is not None:
                return found.marker
            try:
                found = scanner.push((yield))
            except EndOfText:
                if at_end and not scanner.flush():
                    return AT_END
                raise

    def _read_content(self, text: str) -> str:
        """Return the text left to read."""
        found = self._scanner.push(text)
        self._add_content(found.before)
        if found.marker is not None:
            self._begin(found.marker)
        return found.after

    def _begin(self, marker: str) -> None:
        self._call_text = [marker]
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
            self._call_text.append(char)
            try:
                self._call.send(char)
            except StopIteration:
                self._call = None
                self._end_call()
                return text[at + 1 :]
            except Malformed as reason:
                del self._call_text[-1:]  # nothing is left where an argument came out of it
                self._give_up(reason)
                return text[at:]  # the character may begin a marker
        return ""

    def _finish_call(self, call: Steps[None]) -> None:
        """Tell the grammar that there is no more text. It may still emit events."""
        try:
            call.throw(EndOfText)
            call.close()
        except (EndOfText, Malformed, StopIteration):
            pass
        self._call = None
        self._end_call()

    def _end_call(self) -> None:
        if self._announced:
            self._announced = False
            self._after_call = True
            self._events.append(ToolCallEnd(self._index))

    def _give_up(self, reason: Malformed | None = None) -> None:
        """Take for content what was read and is no part of a call."""
        self._call = None
        self._end_call()
        self._add_content("".join(self._call_text))

    def _take_events(self) -> list[Event]:
        events, self._events = self._events, []
        return events


class TypedToolParser(MarkedToolParser):
    """Finds calls whose arguments are bare text: the schema of the tool tells its type."""

    def _argue_string(self, text: str) -> None:
        """Emit part of a JSON string."""
        self._argue(json.dumps(text, ensure_ascii=False)[1:-1])

    def _argue_key(self, key: str, *ends: str) -> Steps[str]:
        """Emit the key of a parameter, up to its colon, and return it. Read it if it is empty."""
        parts = [key]

        def take(part: str) -> None:
            parts.append(part)
            self._argue_string(part)

        if key:
            self._argue_string(key)
        else:
            yield from read_to(take, *ends)
        self._argue('": ')
        return "".join(parts)

    def _argue_typed(self, types: Types, read: Callable[[Take], Steps[_T]]) -> Steps[_T]:
        """Read a value and emit it as JSON of one of `types`, or as a string."""
        if types <= {"string"}:  # such a value can be passed on while it is written
            self._argue('"')
            found = yield from read(self._argue_string)
            self._argue('"')
            return found
        parts: list[str] = []
        try:
            return (yield from read(parts.append))
        finally:  # also where the output ends in the middle
            self._argue(json_text("".join(parts), types))
