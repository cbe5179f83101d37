"""Harmony, the format of gpt-oss: messages with a header and a channel, between special tokens.

    <|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>final<|message|>...

Reasoning is in the channel `analysis`. A message to a function is a call, in any channel; every
other message is content. The special tokens are told from text that is spelled like them: they come
through `mark`, and text through `push`.

A header names the speaker, the recipient and the channel:

    assistant to=functions.weather<|channel|>commentary <|constrain|>json

Models place the recipient before or behind the channel, write the content type with and without
`<|constrain|>`, and leave out parts. So a header is read word by word. It ends with `<|message|>`.
What began like one and does not end so, because the model left a token out or writes no Harmony at
all, is text. Format: github.com/openai/harmony.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable
from typing import ClassVar, NamedTuple

from .base import Content, Event, Reasoning, ToolArguments, ToolCallEnd, ToolCallStart

CHANNEL, CONSTRAIN, START = "<|channel|>", "<|constrain|>", "<|start|>"
_MARKS = (CHANNEL, CONSTRAIN, START)
CHANNELS = ("analysis", "commentary", "final")
NAMESPACE = "functions."  # of the request's tools, in recipients

_ROLES = ("assistant", "user", "system", "developer", "tool")
_TYPES = ("json", "code")  # of contents, as models write them without `<|constrain|>`
_WORD = re.compile(rf"<\|\w+\|>|to=[^\s<]*|{'|'.join(CHANNELS + _ROLES)}|[^\s<]+|<")
MAX_HEADER = 1024  # characters; more are text
_MAX_DOUBTFUL = 32  # characters of a header that have no place in one: more are text
_MOST_DOUBTFUL_WORDS = 2  # that `<|message|>` makes a channel's name and a content type
_MESSAGE = "<|message|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>")
_BUILT_IN = frozenset({"assistant", "user", "python", "browser", "container"})  # no functions

_Kind = type[Reasoning] | type[Content] | type[ToolArguments]


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


class HarmonyParser:
    """Parses the reasoning, the content and the calls of one output."""

    markers: ClassVar[tuple[str, ...]] = ()
    also_ends: tuple[str, ...] = ()
    answer: ClassVar[tuple[str, ...]] = ()
    may_open = False
    ends_output: ClassVar[tuple[str, ...]] = _ENDS[1:]
    structure: ClassVar[tuple[str, ...]] = (START, CHANNEL, CONSTRAIN, _MESSAGE, *_ENDS)

    def __init__(self, prompt: str, tools: Container[str] = ()) -> None:
        """Start where `prompt` ends. Messages to functions are calls if there are `tools`."""
        self._tools = tools
        self._header: str | None = ""  # None: the text of a message is next
        self._kind: _Kind | None = None  # of the open message
        self._index = -1  # of the latest call
        self._wrote = False  # the open message has text
        self._written: set[_Kind] = set()  # kinds of messages that have text
        self._of_prompt = 0  # characters of the open header
        self._read_prompt(prompt)
        self._of_prompt = len(self._header or "")

    @property
    def in_header(self) -> bool:
        """Return whether the text that comes next belongs to a header."""
        return self._header is not None

    @property
    def reasoning(self) -> bool:
        return self._header is None and self._kind is Reasoning

    @property
    def may_reason(self) -> bool:
        return self._header is not None or self._kind is Reasoning

    def push(self, text: str) -> list[Event]:
        return self._write(self.hold(text) if self.in_header else text)

    def hold(self, text: str) -> str:
        """Add text to the open header. Return what turns out to be no header."""
        header = self._header or ""
        room = MAX_HEADER - len(header)
        self._header = header = header + text[:room]
        doubtful = len(header) == MAX_HEADER or len(read_header(header).rest) > _MAX_DOUBTFUL
        return self._give_up() + text[room:] if doubtful else ""

    def divides(self, token: str) -> bool:
        """Return whether a token of `structure` ends a text or a header here."""
        if token == _MESSAGE:
            return self.in_header
        return token in (START, *_ENDS) or (token == CHANNEL and not _lacks_channel(self._header))

    def release(self, token: str | None) -> str:
        """Return what was held of a header that `token`, or the end of the output, refutes."""
        if token == _MESSAGE or (token is None and not read_header(self._header or "").rest):
            return ""
        return self._give_up()

    def mark(self, token: str) -> tuple[list[Event], str]:
        if token == _MESSAGE:
            return self._open(self._header or "")
        if token in _ENDS:
            return self._close(), ""
        self._header = token
        return [], ""

    def finish(self) -> list[Event]:
        events = self._write(self.release(None))
        if self._kind is ToolArguments:
            events.append(ToolCallEnd(self._index))
        return events

    def _read_prompt(self, prompt: str) -> None:
        _, start, last = prompt.rpartition(START)
        for part in re.split(f"({'|'.join(map(re.escape, self.structure))})", start + last):
            if part in self.structure and self.divides(part):
                self.release(part)
                self.mark(part)
            else:
                self.push(part)
        if self._header and read_header(self._header).rest:  # not Harmony, and no text of the model
            self._header = ""
        self._written.clear()

    def _open(self, header: str) -> tuple[list[Event], str]:
        """Begin the message that a complete header announces, and with which it may begin."""
        events = self._close() if self._kind is not None else []
        parsed = read_header(header)
        self._header, self._wrote, self._of_prompt = None, False, 0
        name = self._function(parsed)
        if name is not None:
            self._kind = ToolArguments
            self._index += 1
            events.append(ToolCallStart(self._index, name))
        else:
            self._kind = _kind_of(parsed)
        is_text = _holds_text(header) or len(parsed.rest.split()) > _MOST_DOUBTFUL_WORDS
        return events, parsed.rest if is_text else ""

    def _give_up(self) -> str:
        """Return what of a header is text, and go on in the message that it belongs to."""
        header, self._header = self._header or "", None
        own, self._of_prompt = header[self._of_prompt :], 0
        if self._kind is not None:  # a marker within a message, and no end of it
            return own
        parsed = read_header(header)
        text = own if len(header) == MAX_HEADER else parsed.rest
        if text:
            self._kind, self._wrote = _kind_of(parsed), False
        return text

    def _write(self, text: str) -> list[Event]:
        """Return the text of the open message, on a new line behind one of the same kind."""
        if not text:
            return []
        if self._kind is None:
            self._kind, self._wrote = Content, False
        if self._kind is ToolArguments:
            self._wrote = True
            return [ToolArguments(self._index, text)]
        if not self._wrote and self._kind in self._written:
            text = "\n" + text
        self._wrote = True
        self._written.add(self._kind)
        return [Reasoning(text) if self._kind is Reasoning else Content(text)]

    def _close(self) -> list[Event]:
        """End the open message, if there is one; a header is next."""
        events: list[Event] = []
        if self._kind is ToolArguments:
            if not self._wrote:
                events.append(ToolArguments(self._index, "{}"))  # clients read JSON
            events.append(ToolCallEnd(self._index))
        self._header, self._kind = "", None
        return events

    def _function(self, header: Header) -> str | None:
        """Return the function that a message is addressed to."""
        recipient = header.recipient
        if recipient is None or not self._tools or not recipient.isprintable():
            return None
        name = recipient.removeprefix(NAMESPACE)
        if name == recipient and recipient not in self._tools:
            built_in = recipient.partition(".")[0] in _BUILT_IN
            return None if built_in else recipient
        return name or None


def _lacks_channel(header: str | None) -> bool:
    """Return whether a channel may follow what was read of a header."""
    return header is not None and CHANNEL not in header and not _holds_text(header)


def _holds_text(header: str) -> bool:
    """Return whether there are words before a channel that name neither speaker nor recipient."""
    parsed = read_header(header)
    unknown_speaker = header == START + parsed.rest
    named = CHANNEL in header or parsed.recipient is not None or unknown_speaker
    return bool(parsed.rest) and not named


def _kind_of(header: Header) -> _Kind:
    return Reasoning if header.channel == "analysis" else Content
