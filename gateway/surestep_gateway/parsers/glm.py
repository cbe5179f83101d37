"""Reasoning and tool calls of GLM-4.5 and its successors.

    <think>reasoning</think>content<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>
    </tool_call>

GLM-4.5 and 4.6 lay a call out in lines: one for the name, one for each key and each value. Later
ones write no white space. Values are bare text, whose types the schema of the tool tells.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from functools import partial
from typing import Any, ClassVar

from surestep_gateway.parsers.base import MarkerScanner

from .base import Content, Event
from .qwen3 import CLOSE_THOUGHT, ThoughtParser
from .schema import json_types, properties
from .steps import (
    AT_END,
    MAX_NAME,
    SPACE,
    Ahead,
    Steps,
    Take,
    ValueEnd,
    literal,
    nonspace,
    require,
    value_to,
)
from .tools import CLOSE, OPEN, TypedToolParser

_KEY, _KEY_END = "<arg_key>", "</arg_key>"
_VALUE, _VALUE_END = "<arg_value>", "</arg_value>"
_BEHIND_KEY = Ahead((_VALUE, _KEY, CLOSE))
_BEHIND_CALL = Ahead((OPEN,), ends=True)


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
    """Reads calls whose tags may be missing: `<arg_value>`, and each that closes."""

    markers: ClassVar[tuple[str, ...]] = (OPEN, CLOSE, _KEY, _KEY_END, _VALUE, _VALUE_END)

    def _grammar(self) -> Steps[None]:
        tag = OPEN
        while tag != CLOSE:
            name, char = yield from _name()
            tag = yield from literal(_KEY, CLOSE, begin=char)
            self._announce(name)
            tag = yield from self._arguments(self._schemas.get(name, {}), tag)
            if tag != CLOSE:
                self._next_call(tag)

    def _arguments(self, schema: Mapping[str, Any], tag: str) -> Steps[str]:
        """Read arguments from behind the first one's opening tag. Return the tag behind all."""
        before, key, left = "{", "", set(properties(schema))
        while tag == _KEY:
            self._argue(f'{before}"')
            before = ", "
            key = yield from self._argue_key(key, _KEY_END)
            left.discard(key)
            read: list[str] = []
            tag = yield from _BEHIND_KEY.find(read)
            if tag in (_KEY, CLOSE):
                self._argue("null")
                key = ""
                continue
            begin = "" if tag else "".join(read).lstrip()
            end = yield from self._argue_typed(
                json_types(schema, key), partial(_value, left, begin)
            )
            tag, key = end.ahead, ""
            if end.tag == _VALUE_END:
                tag = yield from self._skip_to(_KEY, CLOSE, OPEN, layout=SPACE, at_end=True)
            elif end.tag == _KEY:
                tag, key = _KEY, end.ahead
        self._argue("{}" if before == "{" else "}")
        return CLOSE if tag == AT_END else tag


def _name() -> Steps[tuple[str, str]]:
    """Return a name, and the first character behind it and behind white space."""
    name, char = "", (yield from nonspace())
    while char != "<" and not char.isspace():
        require(char.isprintable() and len(name) < MAX_NAME)
        name += char
        char = yield
    require(bool(name))
    return name, char if char == "<" else (yield from nonspace())


def _value(keys: Container[str], begin: str, take: Take) -> Steps[ValueEnd]:
    others = {_KEY: Ahead(is_key=keys.__contains__, end_of_key=_KEY_END), CLOSE: _BEHIND_CALL}
    return (yield from value_to(take, (_VALUE_END,), others, begin))
