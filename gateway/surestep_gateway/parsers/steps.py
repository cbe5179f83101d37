"""Steps of grammars: generators that are sent one character of a call at a time."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from typing import NamedTuple, TypeVar

from surestep_gateway.parsers.base import MarkerScanner

from .base import MAX_LAYOUT

SPACE = " \t\r\n"
MAX_NAME = 1024  # characters of a function's name, or of a tag: more are text
AT_END = "end"  # in the place of what follows a tag
_T = TypeVar("_T")
Steps = Generator[None, str, _T]
Take = Callable[[str], None]
_UNESCAPED = {"b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", '"': '"', "\\": "\\", "/": "/"}


class Malformed(Exception):
    """The text is no call, or no more of the one that was announced."""


class EndOfText(Exception):
    """The output has ended; thrown into a grammar."""


def require(condition: bool) -> None:
    """Raise Malformed unless the condition holds."""
    if not condition:
        raise Malformed


def nonspace(layout: str = "") -> Steps[str]:
    """Return the next character that is no white space, nor `layout`. Raise Malformed for a lot."""
    for _ in range(MAX_LAYOUT):
        char = yield
        if not char.isspace() and char not in layout:
            return char
    raise Malformed


def literal(*texts: str, begin: str = "") -> Steps[str]:
    """Read exactly one of `texts`, after white space, and return it. Raise Malformed.

    `begin` was read too much.
    """
    read = begin or (yield from nonspace())
    while read not in texts:
        require(any(text.startswith(read) for text in texts))
        read += yield
    return read


def read_to(take: Take, *markers: str, begin: str = "") -> Steps[str]:
    """Pass on the text before one of `markers`, which is returned. `begin` was read too much."""
    scanner = MarkerScanner(*markers)
    found = scanner.push(begin)
    take(found.before)
    try:
        while found.marker is None:
            found = scanner.push((yield))
            take(found.before)
    finally:  # also where the output ends in the middle
        take(scanner.flush())
    return found.marker


def printable_to(*markers: str, begin: str = "") -> Steps[tuple[str, str]]:
    """Return a name, without white space around, and which of `markers` ended it.

    `begin` was read too much. Raise Malformed.
    """
    parts: list[str] = []

    def take(part: str) -> None:
        require(all(char.isprintable() or char.isspace() for char in part))
        require(len(parts) < MAX_NAME)
        parts.append(part)

    marker = yield from read_to(take, *markers, begin=begin)
    name = "".join(parts).strip()
    require(bool(name) and name.isprintable())
    return name, marker


class Brackets:
    """Depth of a JSON text in brackets."""

    def __init__(self) -> None:
        self.depth = 0
        self.in_string = False
        self._escaped = False

    def push(self, char: str) -> None:
        """Go on by a character."""
        if self.in_string:
            self.in_string = self._escaped or char != '"'
            self._escaped = char == "\\" and not self._escaped
        else:
            self.in_string = char == '"'
            self.depth += (char in "{[") - (char in "]}")


def json_object(take: Take) -> Steps[str]:
    """Pass on the characters of an object whose brace was read, up to the one that closes it.

    Brackets are counted and nothing more is checked: clients may be able to repair a model's
    mistake. A `<` outside of strings cannot be JSON, so it ends the object too and is returned.
    """
    brackets = Brackets()
    brackets.push("{")
    take("{")
    while brackets.depth:
        char = yield
        if char == "<" and not brackets.in_string:
            return char
        brackets.push(char)
        take(char)
    return ""


def object_in_string(begin: Callable[[], Take]) -> Steps[None]:
    """Pass on the object whose JSON text is in a JSON string, from behind the opening quote to
    behind the closing one. Raise Malformed for other texts.

    `begin` is called once, when there is an object.
    """
    take: Take | None = None
    while (text := (yield from _string_part())) is not None:
        if take is None and not text.isspace():
            require(text == "{")
            take = begin()
        if take is not None:
            take(text)
    if take is None:
        begin()("{}")


def _string_part() -> Steps[str | None]:
    """Return a character of a JSON string, None for its end. Escapes that mean the same in the
    text of JSON are left as they are.
    """
    char = yield
    if char != "\\":
        return None if char == '"' else char
    char = yield
    if char != "u":
        return _UNESCAPED.get(char, "\\" + char)
    digits = ""
    while len(digits) < 4:
        digits += yield
    try:
        code = int(digits, 16)
    except ValueError:
        return "\\u" + digits
    return chr(code) if code < 0x80 else "\\u" + digits


class Ahead(NamedTuple):
    """Text that must follow a tag, if it ends a value whose own closing tag is missing."""

    texts: tuple[str, ...] = ()  # one of them, after white space
    is_key: Callable[[str], bool] | None = None  # or a key
    end_of_key: str = ""  # and this behind it
    ends: bool = False  # or the end of the output

    def find(self, read: list[str]) -> Steps[str]:
        """Return what follows, empty if it is something else. `read` becomes what was read."""
        try:
            return (yield from (self._text(read) if self.is_key is None else self._key(read)))
        except EndOfText:
            if self.ends:
                return AT_END
            raise

    def _text(self, read: list[str]) -> Steps[str]:
        while (char := (yield)).isspace() and len(read) < MAX_LAYOUT:
            read.append(char)
        read.append(char)
        found = char
        while found not in self.texts:
            if not any(text.startswith(found) for text in self.texts):
                return ""
            char = yield
            read.append(char)
            found += char
        return found

    def _key(self, read: list[str]) -> Steps[str]:
        end = self.end_of_key
        while (last := "".join(read[-len(end) :])) != end:
            if last.endswith("\n") or len(read) > MAX_NAME:
                return ""
            read.append((yield))
        key = "".join(read[: -len(end)])
        return key if self.is_key is not None and self.is_key(key) else ""


class ValueEnd(NamedTuple):
    """The tag that ended a value, and what was read behind it."""

    tag: str
    ahead: str = ""


def value_to(
    take: Take, closing: tuple[str, ...], others: Mapping[str, Ahead], begin: str = ""
) -> Steps[ValueEnd]:
    """Pass on a value up to a `closing` tag, or up to one of the `others` that end it too where the
    closing one is missing. `begin` was read too much.
    """
    while True:
        tag = yield from read_to(take, *closing, *others, begin=begin)
        if tag in closing:
            return ValueEnd(tag)
        read: list[str] = []
        try:
            found = yield from others[tag].find(read)
        except EndOfText:
            take(tag + "".join(read))
            raise
        if found:
            return ValueEnd(tag, found)
        take(tag)
        begin = "".join(read)
