"""Tool calls as Python: `[f(a="x", b=[1, 2]), g()]`, which Llama 3.2 and 4 and others write.

Values are literals. They are translated to JSON while they are written: no code is compiled, so
that nesting and length cost no more than the text.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable
from typing import ClassVar

from .json_calls import BareJsonToolParser
from .steps import MAX_NAME, EndOfText, Steps, Take, nonspace, require
from .tools import CLOSE, OPEN, Schemas

_CONSTANTS = {"True": "true", "False": "false", "None": "null"} | {
    text: text for text in ("true", "false", "null")
}
_NUMBER = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?([eE][-+]?\d+)?", re.ASCII)
_CLOSING = {"(": ")", "[": "]", "{": "}"}
_ESCAPES = {"a": "\a", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v"} | {
    "0": "\0",
    "\n": "",  # goes on in the next line
    **{char: char for char in "\\'\"/"},
}
_HEX_DIGITS = {"x": 2, "u": 4, "U": 8}
_NO_KEYWORD = frozenset(" '\"=,()[]{}")
_BEHIND_VALUE = ",:)]} \t\r\n"


class PythonicToolParser(BareJsonToolParser):
    """Finds calls of the tools in lists, and one without a list at the beginning of an output.

    Models that were taught both write JSON instead, at times.
    """

    markers: ClassVar[tuple[str, ...]] = (
        "<|python_tag|>",
        "<|python_start|>",
        "<|python_end|>",
        OPEN,
        CLOSE,
    )

    def __init__(self, schemas: Schemas) -> None:
        super().__init__(schemas)
        self._first_letters = {name[:1] for name in schemas}
        self._begin("")

    def _element(self, char: str) -> Steps[None]:
        if char == "{":
            yield from super()._element(char)
            return
        require(char in self._first_letters)
        name = yield from _word_to("(", char, _is_name)
        require(name in self._schemas)
        char = yield from nonspace()
        key = yield from _keyword(char)
        self._announce(name)
        before = "{"
        while key:
            self._argue(f"{before}{json.dumps(key, ensure_ascii=False)}: ")
            before = ", "
            char = yield from python_value(self._argue, (yield from nonspace()))
            require(char in ",)")
            if char == ",":
                char = yield from nonspace()
            read = list[str]()
            try:
                key = yield from _keyword(char, read.append)
            except EndOfText:
                self._argue(before + json.dumps("".join(read), ensure_ascii=False)[:-1])
                raise
        self._argue("{}" if before == "{" else "}")


def _ignore(text: str) -> None:
    """Take no notice of a text."""


def is_keyword(text: str) -> bool:
    """Return whether a text is read as the name of a parameter, which may be no Python name."""
    return text.isprintable() and _NO_KEYWORD.isdisjoint(text) and 0 < len(text) < MAX_NAME


def _keyword(char: str, read: Take = _ignore) -> Steps[str]:
    """Return the name of a parameter that begins with `char`; empty at the closing bracket."""
    return "" if char == ")" else (yield from _word_to("=", char, is_keyword, read))


def _is_name(char: str) -> bool:
    return char.isalnum() or char in "_.-"


def _word_to(end: str, char: str, fits: Callable[[str], bool], read: Take = _ignore) -> Steps[str]:
    """Return a name that begins with `char`, from before `end`. Its characters have to fit.

    Each is passed to `read`.
    """
    name = ""
    while char != end:
        name += char
        read(char)
        require(fits(char) and len(name) < MAX_NAME)
        char = yield
        if char.isspace():
            char = yield from nonspace()
            require(char == end)
    require(bool(name))
    return name


def python_value(take: Take, char: str) -> Steps[str]:
    """Translate a literal of Python that begins with `char`. Return the character behind it."""
    closing: list[str] = []
    between, is_key, done = "", False, False
    while closing or not done:
        if closing and char == closing[-1]:
            take("}" if closing.pop() == "}" else "]")
            between, done = "", True
        elif char == "," and closing:
            between, is_key = ", ", closing[-1] == "}"
        elif char == ":" and closing:
            take(": ")
            is_key = False
        elif not char.isspace():
            take(between)
            between, done = "", True
            if char in _CLOSING:
                closing.append(_CLOSING[char])
                is_key = char == "{"
                take("{" if is_key else "[")
            elif char in "\"'":
                char = yield from _string(take, char)
                continue
            else:
                require(char not in ",:)]}")
                word = ""
                try:
                    while char not in _BEHIND_VALUE:
                        word += char
                        char = yield
                finally:  # also where the output ends in the middle
                    take(json.dumps(word) if is_key else _as_json(word))
                continue
        char = yield
    return (yield from nonspace()) if char.isspace() else char


def _string(take: Take, quote: str) -> Steps[str]:
    """Translate a string, and return the character behind it.

    A quote that no value can end with belongs to the string: models forget to escape it.
    """
    take('"')
    char = yield
    end = quote
    if char == quote:
        char = yield
        if char != quote:
            take('"')
            return char
        end = quote * 3
        char = yield
    quotes = ""  # that may be the end
    while True:
        if quotes == end and (char in _BEHIND_VALUE or len(end) == 3):
            take('"')
            return char
        if char == quote and quotes != end:
            quotes += char
            char = yield
            continue
        take(json.dumps(quotes)[1:-1])
        quotes = ""
        if char == quote:
            continue
        if char == "\\":
            take((yield from _escape()))
        else:
            take(json.dumps(char, ensure_ascii=False)[1:-1])
        char = yield


def _escape() -> Steps[str]:
    """Return what an escape means in Python, as text of a JSON string."""
    char = yield
    digits = ""
    while len(digits) < _HEX_DIGITS.get(char, 0):
        digits += yield
    if char == "u" and re.fullmatch("[0-9a-fA-F]{4}", digits):
        return f"\\u{digits}"  # of a pair, perhaps
    text = _ESCAPES.get(char, "\\" + char + digits)
    with contextlib.suppress(ValueError, OverflowError):
        text = chr(int(digits, 16)) if digits else text
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _as_json(word: str) -> str:
    """Return a constant or a number as JSON, and any other word as a string."""
    if word in _CONSTANTS or _NUMBER.fullmatch(word):
        return _CONSTANTS.get(word, word)
    with contextlib.suppress(ValueError):
        return str(int(word, 0))
    with contextlib.suppress(ValueError, OverflowError):
        return json.dumps(float(word), allow_nan=False)
    return json.dumps(word, ensure_ascii=False)
