"""Tool calls in sections: a marker, calls between markers of their own, and a marker at the end.

DeepSeek's formats with JSON arguments are

    <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{...}<｜tool▁call▁end｜>...

of V3.1, and that of V3 and R1, which has the type `function` in the place of the name, and then the
name and the arguments, fenced as Markdown has it. V3.2 has tags with attributes:

    <｜DSML｜function_calls>
    <｜DSML｜invoke name="NAME">
    <｜DSML｜parameter name="KEY" string="true">VALUE</｜DSML｜parameter>
    </｜DSML｜invoke>
    </｜DSML｜function_calls>

where `string` says whether a value is a string or JSON. MiniMax-M2 has them without prefix and
without that attribute, in `<minimax:tool_call>`; the schema of the tool tells the types. So has
Step3, each in a call like V3's. Models leave out the section's markers and closing tags, and quote
attributes in other ways. Kimi K2 has V3.1's format with markers of its own, and in the
place of a name the id of the call, `functions.NAME:INDEX`.
"""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Container, Mapping
from functools import partial
from typing import Any, ClassVar

from surestep_gateway.parsers.base import MarkerScanner

from .base import Content
from .schema import ANY_JSON, json_types, properties
from .steps import (
    AT_END,
    MAX_NAME,
    SPACE,
    Ahead,
    Steps,
    Take,
    ValueEnd,
    json_object,
    literal,
    nonspace,
    object_in_string,
    printable_to,
    require,
    value_to,
)
from .tools import MarkedToolParser, Schemas, TypedToolParser

_INDEX = re.compile(r"[:_]\d+$")
_ATTRIBUTE = re.compile(r"""\b(name|string)\s*=\s*("[^"]*"|'[^']*'|[^\s"'/]+)""")


class SectionToolParser(MarkedToolParser):
    """Finds sections; subclasses parse the calls. White space between calls is layout.

    A section begins where a call follows its marker. Without one, a call has to be of one of the
    tools. What stands between the calls of a section and is none, is content.
    """

    opens: ClassVar[tuple[str, ...]]  # sections
    closes: ClassVar[tuple[str, ...]]
    call: ClassVar[tuple[str, str]]  # around each call
    leads: ClassVar[tuple[str, ...]] = ()  # texts that may stand between a section's and a call's

    def __init__(self, schemas: Schemas) -> None:
        super().__init__(schemas)
        self._inside = False

    def _grammar(self) -> Steps[None]:
        tag = self._call_text[0]
        bare = tag not in self.opens and not self._inside
        while True:
            while tag != self.call[0]:
                tag = yield from literal(self.call[0], *self.leads)
            tag = yield from self._read_one(bare=bare)
            self._inside = self._inside or not bare
            self._scanner = MarkerScanner(*self.begins, *self.closes)
            if tag in self.closes:
                self._leave()
            if tag in (self.call[1], *self.closes):
                return
            self._next_call(tag)

    @abstractmethod
    def _read_one(self, *, bare: bool) -> Steps[str]:
        """Read a call, from behind its opening marker. Return the marker behind it, which ends
        the call or the section, or begins another one.

        The function of a `bare` call must be one of the tools.
        """

    def _tags(self) -> tuple[str, ...]:
        """Return the markers that can stand behind a call."""
        return (self.call[1], *self.closes, *self.begins)

    def _begin(self, marker: str) -> None:
        if marker in self.closes:
            self._leave()
        else:
            super()._begin(marker)

    def _leave(self) -> None:
        self._space = ""
        self._inside = False
        self._scanner = MarkerScanner(*self.begins)


class DeepSeekV3ToolParser(SectionToolParser):
    """Reads the calls of V3 and of V3.1. Models of one write the other's, too."""

    opens: ClassVar[tuple[str, ...]] = ("<｜tool▁calls▁begin｜>",)
    closes: ClassVar[tuple[str, ...]] = ("<｜tool▁calls▁end｜>",)
    call = ("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>")
    separator: ClassVar = "<｜tool▁sep｜>"
    markers: ClassVar[tuple[str, ...]] = (*opens, *closes, *call, separator)
    begins: ClassVar[tuple[str, ...]] = (*opens, call[0])

    def _read_one(self, *, bare: bool) -> Steps[str]:
        name, _ = yield from printable_to(self.separator)
        char = yield from nonspace()
        if char not in '{`"':  # the name was a type, of which there is one
            name, char = yield from printable_to("\n", "{", begin=char)
            if char != "{":
                char = yield from nonspace()
        if char == "`":
            yield from literal("```json", begin=char)
            char = yield from nonspace()
        name = self._function(name)
        require(char in '{"' and (not bare or name in self._schemas))

        def begin() -> Take:
            self._announce(name)
            return self._argue

        if char == '"':
            yield from object_in_string(begin)
            rest = ""
        else:
            rest = yield from json_object(begin())
        return (yield from self._skip_to(*self._tags(), layout="} \t\r\n`", begin=rest))

    def _function(self, name: str) -> str:
        """Return the name of the function that stands in front of the separator."""
        return name


class KimiK2ToolParser(DeepSeekV3ToolParser):
    """Reads ids as well that clients have spelled as `functions_NAME_INDEX` in the history."""

    opens = ("<|tool_calls_section_begin|>", "<|tool_call_section_begin|>")
    closes = ("<|tool_calls_section_end|>", "<|tool_call_section_end|>")
    call = ("<|tool_call_begin|>", "<|tool_call_end|>")
    separator = "<|tool_call_argument_begin|>"
    markers: ClassVar[tuple[str, ...]] = (*opens, *closes, *call, separator)
    begins: ClassVar[tuple[str, ...]] = (*opens, call[0])

    def _function(self, name: str) -> str:
        bare = name.removeprefix("functions.").removeprefix("functions_")
        alone = _INDEX.sub("", bare) or name
        return next((one for one in (name, bare) if one in self._schemas), alone)


class MiniMaxM2ToolParser(SectionToolParser, TypedToolParser):
    opens: ClassVar[tuple[str, ...]] = ("<minimax:tool_call>",)
    closes: ClassVar[tuple[str, ...]] = ("</minimax:tool_call>",)
    call = ("<invoke", "</invoke>")
    invoke_end: ClassVar[str] = call[1]
    parameter: ClassVar[tuple[str, str]] = ("<parameter", "</parameter>")
    markers: ClassVar[tuple[str, ...]] = (*opens, *closes)
    begins: ClassVar[tuple[str, ...]] = (*opens, call[0])

    def _read_one(self, *, bare: bool) -> Steps[str]:
        attributes = yield from _attributes()
        name = _value_of("name", attributes)
        require(name.isprintable() and bool(name) and (not bare or name in self._schemas))
        empty = attributes.endswith("/")
        tag = self.invoke_end if empty else ""
        if bare and not empty:
            tag = yield from literal(self.parameter[0], self.invoke_end)
        self._announce(name)
        if not tag:
            tag = yield from self._next_tag()
        return (yield from self._parameters(self._schemas.get(name, {}), tag))

    def _parameters(self, schema: Mapping[str, Any], tag: str) -> Steps[str]:
        """Read parameters from behind the first one's opening tag. Return the tag behind all."""
        before, attributes, left = "{", "", set(properties(schema))
        while tag == self.parameter[0]:
            attributes = attributes or (yield from _attributes())
            key = _value_of("name", attributes)
            require(bool(key))
            left.discard(key)
            self._events.append(Content(_ATTRIBUTE.sub("", attributes).strip()))
            self._argue(f'{before}"')
            yield from self._argue_key(key)
            before = ", "
            types = {"true": frozenset({"string"}), "false": ANY_JSON}.get(
                _value_of("string", attributes), json_types(schema, key)
            )
            end = yield from self._argue_typed(types, partial(self._value, left))
            tag, attributes = end.ahead, ""
            if end.tag == self.parameter[1]:
                tag = yield from self._next_tag(at_end=True)
            elif end.tag.endswith(self.parameter[0]):
                tag, attributes = self.parameter[0], end.ahead
        self._argue("{}" if before == "{" else "}")
        return self.call[1] if tag == AT_END else tag

    def _next_tag(self, *, at_end: bool = False) -> Steps[str]:
        tags = (self.parameter[0], self.invoke_end, *self._tags())
        return (yield from self._skip_to(*tags, layout=SPACE, at_end=at_end))

    def _value(self, keys: Container[str], take: Take) -> Steps[ValueEnd]:
        """Pass on a value up to its closing tag.

        Where that is missing, the next parameter ends it, or the end of the call.
        """
        begin, end = self.parameter
        others = {
            begin: Ahead(is_key=lambda text: _value_of("name", text) in keys, end_of_key=">"),
            self.call[1]: Ahead((*self.closes, self.call[0]), ends=True),
        }
        others |= {f"\n{tag}": ahead for tag, ahead in others.items()}
        return (yield from value_to(take, (end,), others))


class DeepSeekV32ToolParser(MiniMaxM2ToolParser):
    opens = ("<｜DSML｜function_calls>", "<｜DSML｜tool_calls>")
    closes = ("</｜DSML｜function_calls>", "</｜DSML｜tool_calls>")
    call = ("<｜DSML｜invoke", "</｜DSML｜invoke>")
    invoke_end = call[1]
    parameter = ("<｜DSML｜parameter", "</｜DSML｜parameter>")
    markers: ClassVar[tuple[str, ...]] = (*opens, *closes, "｜DSML｜")
    begins: ClassVar[tuple[str, ...]] = (*opens, call[0])


class Step3ToolParser(MiniMaxM2ToolParser):
    leads = ("<｜tool_call_begin｜>", "function<｜tool_sep｜>")
    opens = ("<｜tool_calls_begin｜>",)
    closes = ("<｜tool_calls_end｜>",)
    call = ("<steptml:invoke", "<｜tool_call_end｜>")
    invoke_end = "</steptml:invoke>"
    parameter = ("<steptml:parameter", "</steptml:parameter>")
    markers: ClassVar[tuple[str, ...]] = (*opens, *closes, leads[0], call[1], "<｜tool_sep｜>")
    begins: ClassVar[tuple[str, ...]] = (*opens, leads[0], call[0])

    def _read_one(self, *, bare: bool) -> Steps[str]:
        tag = yield from super()._read_one(bare=bare)
        if tag == self.invoke_end:
            tag = yield from self._skip_to(*self._tags(), layout=SPACE, at_end=True)
        return self.call[1] if tag == AT_END else tag


def _attributes() -> Steps[str]:
    """Return the text of a tag from behind its name to its end. Raise Malformed."""
    text, quote = [(yield)], ""
    require(text[0].isspace())
    while quote or text[-1] != ">":
        char = yield
        text.append(char)
        require(len(text) < MAX_NAME)
        if char in "\"'" and quote in ("", char):
            quote = "" if quote else char
    return "".join(text[:-1]).rstrip()


def _value_of(name: str, attributes: str) -> str:
    """Return the value of an attribute, quoted in any way; empty if there is none."""
    found = (match[2] for match in _ATTRIBUTE.finditer(attributes) if match[1] == name)
    value = next(found, "")
    return value[1:-1] if value[:1] in "\"'" else value
