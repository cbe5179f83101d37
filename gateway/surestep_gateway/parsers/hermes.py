"""Tool calls as JSON: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`.

The format of Hermes 2 Pro (NousResearch), which writes the arguments first, and of Qwen2.5 and
Qwen3, which write the name first. Arguments are passed on as the model writes them. Llama 3 writes
the same object without markers, and calls the arguments parameters.
"""

from __future__ import annotations

import json
from collections.abc import Container
from typing import ClassVar

from .base import MAX_LAYOUT
from .tools import (
    CLOSE,
    SPACE,
    Malformed,
    MarkedToolParser,
    Steps,
    json_object,
    literal,
    nonspace,
    require,
)

_PYTHON = "<|python_tag|>"
_LAYOUT = "} \t\r\n"  # between the arguments and the closing marker


class HermesToolParser(MarkedToolParser):
    def _grammar(self) -> Steps[None]:
        yield from literal("{")
        key = yield from _key()
        require(key in ("name", "arguments"))
        begin = yield from self._name_first() if key == "name" else self._arguments_first()
        yield from self._skip_to(CLOSE, layout=_LAYOUT, begin=begin)

    def _name_first(self) -> Steps[str]:
        """Return what was read too much."""
        name = yield from _name()
        char = yield from nonspace()
        if char == "}":
            self._announce(name)
            self._argue("{}")
            return ""
        require(char == "," and (yield from _key()) == "arguments")
        yield from literal("{")
        self._announce(name)
        return (yield from json_object(self._argue))

    def _arguments_first(self) -> Steps[str]:
        """Return what was read too much."""
        yield from literal("{")
        arguments: list[str] = []
        require((yield from json_object(arguments.append)) == "")
        yield from literal(",")
        require((yield from _key()) == "name")
        self._announce((yield from _name()))
        self._argue("".join(arguments))
        return ""


class Llama3JsonToolParser(HermesToolParser):
    """Calls begin the output, or follow `<|python_tag|>` or another call and `;`. JSON that names
    none of the tools is content: it may be the answer.
    """

    markers: ClassVar[tuple[str, ...]] = (_PYTHON,)
    begins: ClassVar[tuple[str, ...]] = (_PYTHON,)

    def __init__(self, tools: Container[str]) -> None:
        super().__init__()
        self._tools = tools
        self._begin("")

    def _grammar(self) -> Steps[None]:
        char = yield from self._first()
        if char == ";" and self._after_call:
            char = yield from self._first()
        if (yield from literal(_PYTHON, "{", begin=char)) == _PYTHON:
            yield from literal("{")
        require((yield from _key()) == "name")
        name = yield from _name()
        require(name in self._tools)
        yield from literal(",")
        require((yield from _key()) in ("parameters", "arguments"))
        yield from literal("{")
        self._announce(name)
        begin = yield from json_object(self._argue)
        yield from self._skip_to("}", layout=SPACE, begin=begin)

    def _first(self) -> Steps[str]:
        """Return the next character that is no white space, of which there must be an end."""
        while (char := (yield)).isspace():
            require(len(self._call_text) < MAX_LAYOUT)
        return char

    def _end_call(self) -> None:
        super()._end_call()
        self._begin("")


def _key() -> Steps[str]:
    key = yield from _string()
    yield from literal(":")
    return key


def _name() -> Steps[str]:
    name = yield from _string()
    require(name.isprintable() and bool(name))
    return name


def _string() -> Steps[str]:
    yield from literal('"')
    text, escaped = ['"'], False
    while text[-1] != '"' or escaped or len(text) == 1:
        escaped = text[-1] == "\\" and not escaped
        text.append((yield))
        require(text[-1] >= " ")
    try:
        value: str = json.loads("".join(text))
    except ValueError as error:
        raise Malformed from error
    return value
