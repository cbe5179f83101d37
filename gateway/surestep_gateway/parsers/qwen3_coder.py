"""Tool calls as tags, the format of Qwen3-Coder, of Qwen3.5 and of Nemotron 3.

    <tool_call>
    <function=NAME>
    <parameter=KEY>
    VALUE
    </parameter>
    </function>
    </tool_call>

One newline on either side of a value is layout. The text of a value does not tell a string from a
number; the schema of the tool does. Models leave out `<tool_call>`, and closing tags. Seed-OSS has
`<seed:tool_call>` and no such newlines: where the first is missing, the last one is text.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from functools import partial
from typing import Any, ClassVar

from .schema import json_types, properties
from .steps import (
    AT_END,
    SPACE,
    Ahead,
    Steps,
    Take,
    ValueEnd,
    literal,
    printable_to,
    require,
    value_to,
)
from .tools import OPEN, TypedToolParser

_FUNCTION, _PARAMETER = "<function=", "<parameter="
_FUNCTION_END, _PARAMETER_END = "</function>", "</parameter>"
_CLOSING = ("\n" + _PARAMETER_END, _PARAMETER_END)


class Qwen3CoderToolParser(TypedToolParser):
    begins: ClassVar[tuple[str, ...]] = (OPEN, _FUNCTION)
    lines: ClassVar[bool] = True  # values have lines of their own

    def _grammar(self) -> Steps[None]:
        begin, end = self.markers
        marker = self._call_text[0]
        bare = marker == _FUNCTION
        while True:
            if marker == begin:
                yield from literal(_FUNCTION)
                bare = False
            marker = yield from self._function(bare=bare)
            if marker == end:
                return
            self._next_call(marker)

    def _function(self, *, bare: bool) -> Steps[str]:
        """Read a function, and return the tag behind it. One that is `bare` is among text."""
        name, end = yield from printable_to(">", "\n")
        require(end == ">" or name in self._schemas)
        tag = ""
        if bare:
            require(name in self._schemas)
            tag = yield from literal(_PARAMETER, _FUNCTION_END)
        self._announce(name)
        if not bare:
            tag = yield from self._next_tag()
        tag = yield from self._parameters(self._schemas.get(name, {}), tag)
        if tag != _FUNCTION_END:
            return tag
        self._call_text.clear()
        if bare:
            return (yield from literal(*self.markers, _FUNCTION))
        return (yield from self._skip_to(*self.markers, _FUNCTION, layout=SPACE))

    def _parameters(self, schema: Mapping[str, Any], tag: str) -> Steps[str]:
        """Read parameters from behind the first one's opening tag, and return the tag behind all.

        There are none if `tag` is another.
        """
        before, key, left = "{", "", set(properties(schema))
        while tag == _PARAMETER:
            self._argue(f'{before}"')
            key = yield from self._argue_key(key, ">", "\n")
            left.discard(key)
            end = yield from self._argue_typed(json_types(schema, key), partial(self._value, left))
            before, tag, key = ", ", end.ahead, ""
            if end.tag in _CLOSING:
                tag = yield from self._next_tag(at_end=True)
            elif end.tag in (_PARAMETER, "\n" + _PARAMETER):
                tag, key = _PARAMETER, end.ahead
        self._argue("{}" if before == "{" else "}")
        return self.markers[1] if tag == AT_END else tag

    def _next_tag(self, *, at_end: bool = False) -> Steps[str]:
        tags = (_PARAMETER, _FUNCTION_END, *self.markers, _FUNCTION)
        return (yield from self._skip_to(*tags, layout=SPACE, at_end=at_end))

    def _value(self, keys: Container[str], take: Take) -> Steps[ValueEnd]:
        """Pass on a value up to its closing tag, without the newlines of the layout.

        Where that is missing, another parameter ends it, or the end of the function or the call.
        """
        begin, end = self.markers
        first = yield
        others = {
            _PARAMETER: Ahead(is_key=keys.__contains__, end_of_key=">"),
            _FUNCTION_END: Ahead((end, _FUNCTION), ends=True),
            end: Ahead((begin,), ends=True),
        }
        others |= {f"\n{tag}": ahead for tag, ahead in others.items()}
        closing = _CLOSING if self.lines or first == "\n" else _CLOSING[1:]
        return (yield from value_to(take, closing, others, "" if first == "\n" else first))


class SeedOssToolParser(Qwen3CoderToolParser):
    markers: ClassVar[tuple[str, ...]] = ("<seed:tool_call>", "</seed:tool_call>")
    begins: ClassVar[tuple[str, ...]] = (markers[0], _FUNCTION)
    lines = False
