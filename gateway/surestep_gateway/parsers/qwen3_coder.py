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

from collections.abc import Mapping
from typing import Any

from .schema import json_types
from .tools import CLOSE, SPACE, Steps, Take, TypedToolParser, literal, read_to, require

_FUNCTION, _PARAMETER = "<function=", "<parameter="
_FUNCTION_END, _PARAMETER_END = "</function>", "</parameter>"


class Qwen3CoderToolParser(TypedToolParser):
    def _grammar(self) -> Steps[None]:
        yield from literal(_FUNCTION)
        name = yield from read_to(lambda text: require(text.isprintable()), ">")
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
            yield from self._skip_to(CLOSE, layout=SPACE)

    def _next_tag(self) -> Steps[str]:
        return (yield from self._skip_to(_PARAMETER, _FUNCTION_END, CLOSE, layout=SPACE))

    def _parameter(self, schema: Mapping[str, Any]) -> Steps[None]:
        self._argue('"')
        key = yield from read_to(self._argue_string, ">")
        self._argue('": ')
        yield from self._argue_typed(json_types(schema, key), _value)


def _value(take: Take) -> Steps[None]:
    """Pass on a value up to its closing tag, without the newlines of the layout."""
    first = yield
    begin = "" if first == "\n" else first
    yield from read_to(take, "\n" + _PARAMETER_END, _PARAMETER_END, begin=begin)
