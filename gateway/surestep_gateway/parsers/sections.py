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
without that attribute, in `<minimax:tool_call>`; the schema of the tool tells the types.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

from .schema import ANY_JSON, Types, json_types
from .stop_strings import MarkerScanner
from .tools import (
    SPACE,
    MarkedToolParser,
    Steps,
    Take,
    TypedToolParser,
    json_object,
    literal,
    printable_to,
    read_to,
)

_STRING, _JSON = 'string="true"', 'string="false"'


class SectionToolParser(MarkedToolParser):
    """Finds sections; subclasses parse the calls. White space between calls is layout.

    A section begins where a call follows its marker. What stands between its calls and is none, is
    content.
    """

    section: ClassVar[tuple[str, str]]  # around the calls
    call: ClassVar[tuple[str, str]]  # around each of them

    def _grammar(self) -> Steps[None]:
        if self._call_text[0] == self.section[0]:
            yield from literal(self.call[0])
        yield from self._read_one()
        self._scanner = MarkerScanner(self.section[0], self.call[0], self.section[1])

    @abstractmethod
    def _read_one(self) -> Steps[None]:
        """Read a call, from behind its opening marker to behind the closing one."""

    def _begin(self, marker: str) -> None:
        if marker != self.section[1]:
            super()._begin(marker)
            return
        self._space = ""
        self._scanner = MarkerScanner(*self.begins)


class DeepSeekV31ToolParser(SectionToolParser):
    section = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
    call = ("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>")
    separator: ClassVar = "<｜tool▁sep｜>"
    markers: ClassVar[tuple[str, ...]] = (*section, *call, separator)
    begins: ClassVar[tuple[str, ...]] = section[:1]

    def _read_one(self) -> Steps[None]:
        name = yield from self._name()
        yield from literal("{")
        self._announce(name)
        begin = yield from json_object(self._argue)
        yield from self._skip_to(self.call[1], layout="} \t\r\n`", begin=begin)

    def _name(self) -> Steps[str]:
        return (yield from printable_to(self.separator))


class DeepSeekV3ToolParser(DeepSeekV31ToolParser):
    def _name(self) -> Steps[str]:
        yield from super()._name()  # a type, of which there is one
        name = yield from printable_to("\n")
        yield from literal("```json")
        return name


class MiniMaxM2ToolParser(SectionToolParser, TypedToolParser):
    section = ("<minimax:tool_call>", "</minimax:tool_call>")
    call = ('<invoke name="', "</invoke>")
    parameter: ClassVar = ('<parameter name="', "</parameter>")
    markers: ClassVar[tuple[str, ...]] = section
    begins: ClassVar[tuple[str, ...]] = section[:1]

    def _read_one(self) -> Steps[None]:
        name = yield from printable_to('"')
        yield from literal(">")
        self._announce(name)
        schema = self._schemas.get(name, {})
        before = "{"
        while (yield from self._skip_to(self.parameter[0], self.call[1], layout=SPACE)) != (
            self.call[1]
        ):
            self._argue(f'{before}"')
            yield from self._read_parameter(schema)
            before = ", "
        self._argue("{}" if before == "{" else "}")

    def _read_parameter(self, schema: Mapping[str, Any]) -> Steps[None]:
        key = yield from read_to(self._argue_string, '"')
        self._argue('": ')
        types = yield from self._attributes(json_types(schema, key))
        yield from self._argue_typed(types, self._value)

    def _attributes(self, types: Types) -> Steps[Types]:
        """Read to the end of a tag. Return the types of the value, which are `types` by schema."""
        yield from self._skip_to(">", layout=SPACE)
        return types

    def _value(self, take: Take) -> Steps[str]:
        return (yield from read_to(take, self.parameter[1]))


class DeepSeekV32ToolParser(MiniMaxM2ToolParser):
    section = ("<｜DSML｜function_calls>", "</｜DSML｜function_calls>")
    call = ('<｜DSML｜invoke name="', "</｜DSML｜invoke>")
    parameter = ('<｜DSML｜parameter name="', "</｜DSML｜parameter>")
    markers: ClassVar[tuple[str, ...]] = (*section, "｜DSML｜")
    begins: ClassVar[tuple[str, ...]] = section[:1]

    def _attributes(self, types: Types) -> Steps[Types]:
        found = yield from self._skip_to(_STRING, _JSON, ">", layout=SPACE)
        if found != ">":
            yield from self._skip_to(">", layout=SPACE)
        return {_STRING: frozenset({"string"}), _JSON: ANY_JSON}.get(found, types)
