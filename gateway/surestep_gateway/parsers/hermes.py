"""Tool calls as JSON: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`.

The format of Hermes 2 Pro (NousResearch), which writes the arguments first, and of Qwen2.5 and
Qwen3, which write the name first. Arguments are passed on as the model writes them. Llama, xLAM and
Mistral write such objects without markers around, one or a list of them.
"""

from __future__ import annotations

import json

from .steps import (
    MAX_NAME,
    Malformed,
    Steps,
    Take,
    json_object,
    literal,
    nonspace,
    object_in_string,
    require,
)
from .tools import CLOSE, OPEN, MarkedToolParser

ARGUMENTS = ("arguments", "parameters")
ASIDE = ("id", "type", "index", "call_id", "tool_call_id")  # say nothing that is needed


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
            found = yield from self._skip_to(CLOSE, OPEN, layout="} \t\r\n", begin=rest or char)
            if found == CLOSE:
                return
            self._next_call(OPEN)
            char = yield from nonspace()

    def _object_or_part(self) -> Steps[str]:
        """Read a call. Return what was read behind the arguments and does not belong there."""
        try:
            return (yield from self._object())
        except Malformed:
            if not self._announced:
                raise
            return "".join(self._call_text)


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
