"""Tool calls as Python: `[f(a="x", b=[1, 2]), g()]`, which Llama 3.2 and 4 and others write.

Values are literals. They are translated to JSON while they are written: no code is compiled, so
that nesting and length cost no more than the text.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import ClassVar

from .json_calls import BareJsonToolParser
from .literals import python_value
from .steps import MAX_NAME, EndOfText, Steps, Take, nonspace, require
from .tools import CLOSE, OPEN, Schemas

_NO_KEYWORD = frozenset(" '\"=,()[]{}")


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


class Olmo3ToolParser(PythonicToolParser):
    """Finds calls in lines between markers as well."""

    trails: ClassVar[Mapping[str, str]] = {
        **PythonicToolParser.trails,
        "<function_calls>": "</function_calls>",
    }
    begins: ClassVar[tuple[str, ...]] = (*PythonicToolParser.begins, "<function_calls>")


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
