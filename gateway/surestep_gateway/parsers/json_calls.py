"""Tool calls as JSON: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`.

The format of Hermes 2 Pro (NousResearch), which writes the arguments first, and of Qwen2.5 and
Qwen3, which write the name first. Arguments are passed on as the model writes them. Llama, xLAM and
Mistral write such objects among text, without markers around each:

    {"name": "f", "parameters": {...}}; {"name": "g", "parameters": {...}}
    [{"name": "f", "arguments": {...}}, {"name": "g", "arguments": {...}}]

Objects and lists may stand in fences, or behind a marker such as `<|python_tag|>`. Mistral's stand
behind `[TOOL_CALLS]`; since 2025 it writes `[TOOL_CALLS]f[ARGS]{...}`.

Others write such objects or a list of them between markers as Hermes does: see the subclasses of
HermesToolParser. Some of these formats have no closing marker.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import ClassVar

from .steps import (
    MAX_NAME,
    Brackets,
    Malformed,
    Steps,
    Take,
    json_object,
    literal,
    nonspace,
    object_in_string,
    printable_to,
    require,
)
from .tools import CLOSE, OPEN, MarkedToolParser, Schemas

ARGUMENTS = ("arguments", "parameters")
ASIDE = ("id", "type", "index", "call_id", "tool_call_id")  # say nothing that is needed


_FENCE, _PYTHON = "```", "<|python_tag|>"
_CALLS, _ID, _ARGUMENTS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
_TRAILS = {_FENCE: _FENCE, OPEN: CLOSE, "<|python_start|>": "<|python_end|>"}
_LANGUAGES = ("json", "python", "tool_code")  # of fences; Gemma names the last
_LAYOUT = "}], \t\r\n"  # between the arguments and what comes next


class OtherObject(Malformed):
    """An object of JSON that is no call: there is none within it either."""


class JsonToolParser(MarkedToolParser):
    """Reads objects that are calls. Their keys may be in any order."""

    def _named(self, name: str) -> None:
        """Raise OtherObject for a name that no call has here."""

    def _unnamed_arguments(self) -> None:
        """Raise OtherObject where a call must have arguments."""

    def _object(self, *, nested: bool = False) -> Steps[str]:
        """Read a call, from behind its opening brace to behind the closing one.

        Return what was read too much, where a tag ended it.
        """
        name: str | None = None
        held: list[str] | None = None  # arguments in front of the name
        char = yield from nonspace()
        while True:
            require(char == '"')
            key = yield from _key()
            char = yield from nonspace()
            if key == "name" or (key == "function" and char == '"'):
                require(name is None and not self._announced and char == '"')
                name = yield from _name()
                self._named(name)
                if held is not None:
                    self._announce(name)
                    self._argue("".join(held))
            elif key in ARGUMENTS and not self._announced and held is None:
                rest, held = yield from self._arguments(char, name)
                if rest:
                    return rest
            elif key == "function" and char == "{" and not nested and name is None:
                require(held is None and not self._announced)
                rest = yield from self._object(nested=True)
                if rest:
                    return rest
            elif key in ASIDE:
                yield from _scalar(char)
            else:
                raise OtherObject
            char = yield from nonspace()
            if char == "}":
                break
            require(char == ",")
            char = yield from nonspace()
        if not self._announced:
            self._unnamed_arguments()
            if name is None:
                raise OtherObject
            self._announce(name)
            self._argue("{}")
        self._call_text.clear()
        return ""

    def _arguments(self, char: str, name: str | None) -> Steps[tuple[str, list[str] | None]]:
        """Read arguments that begin with `char`, and announce the call if its name is known.

        Return what was read too much, and the arguments of a call without a name.
        """
        held: list[str] = []

        def begin() -> Take:
            if name is None:
                return held.append
            self._announce(name)
            return self._argue

        rest = ""
        if char == "{":
            rest = yield from json_object(begin())
            require(not rest or name is not None)
        elif char == '"':
            yield from object_in_string(begin)
        elif char == "n":
            yield from literal("null", begin=char)
            begin()("{}")
        else:
            raise OtherObject
        return rest, held if name is None else None


class HermesToolParser(JsonToolParser):
    """Reads objects between `<tool_call>` and `</tool_call>`, whatever the functions' names."""

    closes: ClassVar[tuple[str, ...]] = (CLOSE,)  # markers behind the calls, which may be missing

    def _grammar(self) -> Steps[None]:
        char = yield from nonspace()
        if char == "[":
            char = yield from nonspace()
        while True:
            require(char == "{")
            rest = yield from self._object_or_part()
            while not rest and (char := (yield)) in _LAYOUT:
                self._call_text.clear()
            if not rest and char == "{":  # another call in the same block
                self._next_call(char)
                continue
            tags = (*self.closes, *self.begins)
            found = yield from self._skip_to(*tags, layout="} \t\r\n", begin=rest or char)
            if found in self.closes:
                return
            self._next_call(found)
            char = yield from nonspace()
            if char == "[":
                char = yield from nonspace()

    def _object_or_part(self) -> Steps[str]:
        """Read a call. Return what was read behind the arguments and does not belong there."""
        try:
            return (yield from self._object())
        except Malformed:
            if not self._announced:
                raise
            return "".join(self._call_text)


class GraniteToolParser(HermesToolParser):
    """Reads lists behind the marker of Granite 3.0, or that of 3.1. They need no end."""

    begins = ("<|tool_call|>", OPEN)
    closes = ("<|/tool_call|>", CLOSE)
    markers: ClassVar[tuple[str, ...]] = (*begins, *closes)


class Granite20bToolParser(HermesToolParser):
    """Reads objects, each behind a marker of its own. They need no end."""

    begins = ("<function_call>",)
    closes = ("</function_call>",)
    markers: ClassVar[tuple[str, ...]] = (*begins, *closes)


class Phi4MiniToolParser(GraniteToolParser):
    """Reads lists behind `functools`, or between the tokens that Phi-4-mini has for calls."""

    begins = ("functools", "<|tool_call|>")


class ToolCallsParser(HermesToolParser):
    """Reads lists, as Hunyuan-A13B and Jamba write them, or a line for each call, as MiniMax-M1."""

    begins = ("<tool_calls>",)
    closes = ("</tool_calls>",)
    markers: ClassVar[tuple[str, ...]] = (*begins, *closes)


class NemotronToolParser(HermesToolParser):
    """Reads the lists of Nemotron Nano 2."""

    begins = ("<TOOLCALL>",)
    closes = ("</TOOLCALL>",)
    markers: ClassVar[tuple[str, ...]] = (*begins, *closes)


class InternLmToolParser(HermesToolParser):
    """Reads objects behind two tokens, of which the second says that they are no code to run."""

    begins = ("<|action_start|><|plugin|>",)
    closes = ("<|action_end|>",)
    markers: ClassVar[tuple[str, ...]] = ("<|action_start|>", "<|plugin|>", *closes)


class BareJsonToolParser(JsonToolParser):
    """Finds objects that name one of the tools. Other JSON is content: it may be the answer."""

    markers: ClassVar[tuple[str, ...]] = (
        _PYTHON,
        "<|python_start|>",
        "<|python_end|>",
        _CALLS,
        _ID,
        _ARGUMENTS,
        OPEN,
        CLOSE,
    )
    trails: ClassVar[Mapping[str, str]] = _TRAILS  # behind the calls, by the marker before them
    begins: ClassVar[tuple[str, ...]] = ("{", "[", _PYTHON, *trails)  # `[TOOL_CALLS]` as well

    def __init__(self, schemas: Schemas) -> None:
        super().__init__(schemas)
        self._marked = False  # `[TOOL_CALLS]` says that calls follow
        self._other: Brackets | None = None  # an object that is no call

    @property
    def drafted(self) -> tuple[str, ...]:
        return ()  # reasoning is full of brackets

    def _grammar(self) -> Steps[None]:
        trail = self.trails.get(self._call_text[0], "")
        char, listed = yield from self._lead(self._call_text[0])
        if self._marked and char != "{" and not listed:
            yield from self._call_by_name(char)
            return
        while True:
            yield from self._element(char)
            self._next_call()
            char = yield from nonspace()
            if listed and char == "]":
                listed = False
                self._call_text.clear()
                char = yield from nonspace()
            if trail and char == trail[0]:
                yield from literal(trail, begin=char)
                return
            if char in ",;":
                char = yield from nonspace()
            if char == _PYTHON[0]:
                yield from literal(_PYTHON, begin=char)
                char = yield from nonspace()

    def _lead(self, begun: str) -> Steps[tuple[str, bool]]:
        """Return the first character of a call, and whether it is in a list.

        `begun` is the text that began it.
        """
        char = begun if begun == "{" else (yield)
        listed = begun == "["
        self._marked = listed and char == "T" and _CALLS in self.markers
        named = begun == _FENCE and not char.isspace()
        if char.isspace():
            char = yield from nonspace()
        if self._marked:
            listed = False
            yield from literal(_CALLS[1:], begin=char)
            char = yield from nonspace()
        elif named and char in (language[0] for language in _LANGUAGES):
            yield from literal(*_LANGUAGES, begin=char)
            char = yield from nonspace()
        if char == "[" and not listed:
            listed = True
            char = yield from nonspace()
        return char, listed

    def _element(self, char: str) -> Steps[None]:
        """Read a call that begins with `char`."""
        require(char == "{")
        require((yield from self._object()) == "")

    def _call_by_name(self, char: str) -> Steps[None]:
        name, marker = yield from printable_to(_ID, _ARGUMENTS, "{", begin=char)
        require(not any(map(str.isspace, name)))
        if marker == _ID:
            _, marker = yield from printable_to(_ARGUMENTS, "{")
        if marker == _ARGUMENTS:
            yield from literal("{")
        self._announce(name)
        require((yield from json_object(self._argue)) == "")

    def _named(self, name: str) -> None:
        if name not in self._schemas and not self._marked:
            raise OtherObject

    def _unnamed_arguments(self) -> None:
        if not self._marked:
            raise OtherObject

    def _read_content(self, text: str) -> str:
        if self._other is None:
            return super()._read_content(text)
        for at, char in enumerate(text, start=1):
            self._other.push(char)
            if self._other.depth <= 0:
                self._other = None
                self._add_content(text[:at])
                return text[at:]
        self._add_content(text)
        return ""

    def _give_up(self, reason: Malformed | None = None) -> None:
        text = "".join(self._call_text)
        super()._give_up(reason)
        if isinstance(reason, OtherObject):
            self._other = Brackets()
            for char in text:
                self._other.push(char)


def _key() -> Steps[str]:
    """Return the text of a key, as it is written."""
    text = yield from _raw_string()
    yield from literal(":")
    return text[1:-1]


def _name() -> Steps[str]:
    """Return the name of a function, whose opening quote was read."""
    text = yield from _raw_string()
    try:
        name: str = json.loads(text)
    except ValueError as error:
        raise Malformed from error
    require(name.isprintable() and bool(name))
    return name


def _raw_string() -> Steps[str]:
    """Return a short string as it is written, from behind its opening quote."""
    text, escaped = ['"'], False
    while text[-1] != '"' or escaped or len(text) == 1:
        escaped = text[-1] == "\\" and not escaped
        text.append((yield))
        require(text[-1] >= " " and len(text) < MAX_NAME)
    return "".join(text)


def _scalar(char: str) -> Steps[None]:
    """Read a value that is no list and no object, and begins with `char`."""
    if char == '"':
        yield from _raw_string()
    elif char in "tfn":
        yield from literal("true", "false", "null", begin=char)
    else:
        raise OtherObject
