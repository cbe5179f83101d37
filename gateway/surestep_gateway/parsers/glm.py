"""Reasoning and tool calls of GLM-4.5 and its successors.

    <think>reasoning</think>content<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>
    </tool_call>

GLM-4.5 and 4.6 lay a call out in lines: one for the name, one for each key and each value. Later
ones write no white space. Values are bare text, whose types the schema of the tool tells.
"""

from __future__ import annotations

from collections.abc import Container
from typing import ClassVar

from .events import Content, Event
from .qwen3 import CLOSE_THOUGHT, ThoughtParser
from .schema import json_types
from .stop_strings import MarkerScanner
from .tools import (
    CLOSE,
    OPEN,
    SPACE,
    Steps,
    Take,
    TypedToolParser,
    literal,
    nonspace,
    read_to,
    require,
)

_KEY, _KEY_END = "<arg_key>", "</arg_key>"
_VALUE, _VALUE_END = "<arg_value>", "</arg_value>"


class GlmReasoningParser(ThoughtParser):
    """A call ends the reasoning, and `</think>` among content in front of calls is dropped."""

    def __init__(self, prompt: str, tools: Container[str] = ()) -> None:
        """Calls are looked for where there are `tools`."""
        self._calls = (OPEN,) if tools else ()
        super().__init__(prompt, also_ends=self._calls)
        self._strays: MarkerScanner | None = MarkerScanner(CLOSE_THOUGHT, *self._calls)

    def finish(self) -> list[Event]:
        held = self._strays.flush() if self._strays is not None else ""
        return [*super().finish(), Content(held)]

    def _push_content(self, text: str) -> list[Event]:
        kept = ""
        while text and self._strays is not None:
            found = self._strays.push(text)
            kept, text = kept + found.before, found.after
            if found.marker == OPEN:
                self._strays = None
                text = OPEN + text
        return super()._push_content(kept + text)


class GlmToolParser(TypedToolParser):
    markers: ClassVar[tuple[str, ...]] = (OPEN, CLOSE, _KEY, _KEY_END, _VALUE, _VALUE_END)

    def _grammar(self) -> Steps[None]:
        name, char = yield from _name()
        marker = yield from literal(_KEY, CLOSE, begin=char)
        self._announce(name)
        schema = self._schemas.get(name, {})
        before = "{"
        while marker == _KEY:
            self._argue(f'{before}"')
            key = yield from read_to(self._argue_string, _KEY_END)
            self._argue('": ')
            before = ", "
            marker = yield from self._skip_to(_VALUE, _KEY, CLOSE, layout=SPACE)
            if marker != _VALUE:  # there is none
                self._argue("null")
                continue
            yield from self._argue_typed(json_types(schema, key), _value)
            marker = yield from self._skip_to(_KEY, CLOSE, layout=SPACE)
        self._argue("{}" if before == "{" else "}")


def _name() -> Steps[tuple[str, str]]:
    """Return a name, and the first character behind it and behind white space."""
    name, char = "", (yield from nonspace())
    while char != "<" and not char.isspace():
        require(char.isprintable())
        name += char
        char = yield
    require(bool(name))
    return name, char if char == "<" else (yield from nonspace())


def _value(take: Take) -> Steps[str]:
    return (yield from read_to(take, _VALUE_END))
