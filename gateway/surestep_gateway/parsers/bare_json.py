"""Tool calls as JSON among text, without markers around each: Llama's, xLAM's and Mistral's.

    {"name": "f", "parameters": {...}}; {"name": "g", "parameters": {...}}
    [{"name": "f", "arguments": {...}}, {"name": "g", "arguments": {...}}]

Objects and lists may stand in fences, or behind a marker such as `<|python_tag|>`. Mistral's stand
behind `[TOOL_CALLS]`; since 2025 it writes `[TOOL_CALLS]f[ARGS]{...}`.
"""

from __future__ import annotations

from typing import ClassVar

from .hermes import JsonToolParser, OtherObject
from .steps import Brackets, Malformed, Steps, json_object, literal, nonspace, printable_to, require
from .tools import CLOSE, OPEN, Schemas

_FENCE, _PYTHON = "```", "<|python_tag|>"
_CALLS, _ID, _ARGUMENTS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
_TRAILS = {_FENCE: _FENCE, OPEN: CLOSE, "<|python_start|>": "<|python_end|>"}
_LANGUAGES = ("json", "python")  # of fences


class BareJsonToolParser(JsonToolParser):
    """Finds objects that name one of the tools. Other JSON is content: it may be the answer."""

    markers: ClassVar[tuple[str, ...]] = (
        *(_PYTHON, "<|python_start|>", "<|python_end|>"),
        *(_CALLS, _ID, _ARGUMENTS, OPEN, CLOSE),
    )
    begins: ClassVar[tuple[str, ...]] = ("{", "[", _PYTHON, *_TRAILS)  # `[TOOL_CALLS]` as well

    def __init__(self, schemas: Schemas) -> None:
        super().__init__(schemas)
        self._marked = False  # `[TOOL_CALLS]` says that calls follow
        self._other: Brackets | None = None  # an object that is no call

    @property
    def drafted(self) -> tuple[str, ...]:
        return ()  # reasoning is full of brackets

    def _grammar(self) -> Steps[None]:
        trail = _TRAILS.get(self._call_text[0], "")
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
        if char.isspace():
            char = yield from nonspace()
        if self._marked:
            listed = False
            yield from literal(_CALLS[1:], begin=char)
            char = yield from nonspace()
        elif begun == _FENCE and char in (language[0] for language in _LANGUAGES):
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
