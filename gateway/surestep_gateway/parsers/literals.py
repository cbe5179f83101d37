"""Lists, objects and other values as Python writes them, in JSON. No code is compiled."""

from __future__ import annotations

import contextlib
import json
import re

from .steps import Malformed, Steps, Take, nonspace, require

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
_BEHIND_VALUE = ",:)]} \t\r\n"


def json_of_python(text: str) -> str:
    """Return a value that is all of a text as JSON, and any other text as it is."""
    parts: list[str] = []
    reader = python_value(parts.append, text[:1])
    at = 0
    try:
        next(reader)
        for char in f"{text[1:]},":
            at += 1
            reader.send(char)
    except StopIteration:
        return "".join(parts) if at == len(text) else text
    except Malformed:
        pass
    return text


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
