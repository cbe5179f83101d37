"""Headers of Harmony's messages: the speaker, the recipient and the channel.

    assistant to=functions.weather<|channel|>commentary <|constrain|>json

Models place the recipient before or behind the channel, write the content type with and without
`<|constrain|>`, and leave out parts. So a header is read word by word.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

CHANNEL, CONSTRAIN, START = "<|channel|>", "<|constrain|>", "<|start|>"
_MARKS = (CHANNEL, CONSTRAIN, START)
CHANNELS = ("analysis", "commentary", "final")
NAMESPACE = "functions."  # of the request's tools, in recipients

_ROLES = ("assistant", "user", "system", "developer", "tool")
_TYPES = ("json", "code")  # of contents, as models write them without `<|constrain|>`
_WORD = re.compile(rf"<\|\w+\|>|to=[^\s<]*|{'|'.join(CHANNELS + _ROLES)}|[^\s<]+|<")


class Header(NamedTuple):
    channel: str | None  # one of CHANNELS; None if it is missing, or unknown
    recipient: str | None
    rest: str  # from the first word on that need not belong to a header


def read_header(text: str) -> Header:
    """Return the parts of a header, which may be cut off anywhere."""
    channel: str | None = None
    recipient: str | None = None
    rest: int | None = None  # where it begins
    before = ""
    for match in _WORD.finditer(text):
        word = match[0]
        if word in _MARKS or _names_type(match, before) or _is_one_of(["to="], match):
            pass
        elif word.startswith("to="):
            recipient = word.removeprefix("to=") or None
        elif before == CHANNEL:
            channel = next((name for name in CHANNELS if name.startswith(word)), None)
            rest = match.start() if channel is None and rest is None else rest
        elif before in CHANNELS and word.startswith(NAMESPACE):
            recipient = word
            rest = match.start() if rest is None else rest
        elif not _names_role(match, before) and rest is None:
            rest = match.start()
        before = word
    return Header(channel, recipient, "" if rest is None else text[rest:])


def _names_type(match: re.Match[str], before: str) -> bool:
    """Return whether a word is the content's type, with or without its marker."""
    placed = before in CHANNELS or before.startswith("to=")
    return before == CONSTRAIN or (placed and _is_one_of(_TYPES, match))


def _names_role(match: re.Match[str], before: str) -> bool:
    """Return whether a word is the speaker: the first one, alone unless behind `<|start|>`."""
    if before == START:
        return match[0].startswith(NAMESPACE) or _is_one_of(_ROLES, match)
    alone = match.string[match.end() : match.end() + 1] in ("", " ", "<")
    return not before and alone and (match[0] in _ROLES or match[0].startswith(NAMESPACE))


def _is_one_of(names: Iterable[str], match: re.Match[str]) -> bool:
    """Return whether a word is one of `names`, or may become one where the text ends."""
    cut_off = match.end() == len(match.string)
    return any(name.startswith(match[0]) if cut_off else name == match[0] for name in names)
