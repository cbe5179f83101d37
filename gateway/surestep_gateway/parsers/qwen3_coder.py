"""Tool calls as tags, the format of Qwen3-Coder and of Qwen3.5.

    <tool_call>
    <function=NAME>
    <parameter=KEY>
    VALUE
    </parameter>
    </function>
    </tool_call>

One newline on either side of a value is layout. The text of a value does not tell a string from a
number; the schema of the tool does.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from .schema import json_text, json_types
from .stop_strings import MarkerScanner
from .tools import CLOSE, MarkedToolParser, Steps, literal, require

_FUNCTION, _PARAMETER = "<function=", "<parameter="
_FUNCTION_END, _PARAMETER_END = "</function>", "</parameter>"
_SPACE = " \t\r\n"

Schemas = Mapping[str, Mapping[str, Any]]  # of the parameters, by the name of the function


class Qwen3CoderToolParser(MarkedToolParser):
    def __init__(self, schemas: Schemas) -> None:
        super().__init__()
        self._schemas = schemas

    def _grammar(self) -> Steps[None]:
        yield from literal(_FUNCTION)
        name = yield from _until_bracket(lambda char: require(char.isprintable()))
        require(bool(name))
        self._announce(name)
        schema = self._schemas.get(name, {})
        before = "{"
        marker = yield from self._next_tag()
        while marker == _PARAMETER:
            self._argue(before)
            yield from self._parameter(schema)
            before = ", "
            marker = yield from self._next_tag()
        self._argue("{}" if before == "{" else "}")
        if marker != CLOSE:
            yield from self._skip_to(CLOSE, layout=_SPACE)

    def _next_tag(self) -> Steps[str]:
        return (yield from self._skip_to(_PARAMETER, _FUNCTION_END, CLOSE, layout=_SPACE))

    def _parameter(self, schema: Mapping[str, Any]) -> Steps[None]:
        self._argue('"')
        key = yield from _until_bracket(self._argue_string)
        self._argue('": ')
        types = json_types(schema, key)
        if types <= {"string"}:  # such a value can be passed on while it is written
            self._argue('"')
            yield from _value(self._argue_string)
            self._argue('"')
            return
        parts: list[str] = []
        try:
            yield from _value(parts.append)
        finally:  # also where the output ends in the middle
            self._argue(json_text("".join(parts), types))

    def _argue_string(self, text: str) -> None:
        """Emit part of a JSON string."""
        self._argue(json.dumps(text, ensure_ascii=False)[1:-1])


def _until_bracket(take: Callable[[str], None]) -> Steps[str]:
    """Pass on the text before the next `>` and return it."""
    text: list[str] = []
    while (char := (yield)) != ">":
        take(char)
        text.append(char)
    return "".join(text)


def _value(take: Callable[[str], None]) -> Steps[None]:
    """Pass on a value up to its closing tag, without the newlines of the layout."""
    scanner = MarkerScanner("\n" + _PARAMETER_END, _PARAMETER_END)
    first = yield
    found = scanner.push("" if first == "\n" else first)
    try:
        while found.marker is None:
            take(found.before)
            found = scanner.push((yield))
        take(found.before)
    finally:  # also where the output ends in the middle
        take(scanner.flush())
