"""Conversations of other APIs as messages of a chat, and the fields that a chat has too.

Some APIs give an answer as a list of parts: its blocks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, NamedTuple

from surestep_common.errors import InvalidRequest

from surestep_gateway.grammars.fields import StructuredBody
from surestep_gateway.parsers import (
    Content,
    Event,
    Reasoning,
    ToolArguments,
    ToolCallEnd,
    ToolCallStart,
)
from surestep_gateway.request.parse import UNSUPPORTED
from surestep_gateway.request.protocol import CUT, SamplingBody

Json = dict[str, Any]
INSTRUCTING = ("system", "developer")

# Fields of a chat by the same names: what constrains it is obeyed, what it refuses is refused.
_SHARED = StructuredBody.model_fields.keys() | UNSUPPORTED


def shared_fields(body: SamplingBody, response_format: Json | None, place: str) -> Json:
    """Return the fields of a body that a chat has too. Raise InvalidRequest.

    `response_format` is what the body has for it at `place`.
    """
    extra = body.model_extra or {}
    given: Json = {
        name: getattr(body, name)
        for name in SamplingBody.model_fields.keys() & body.model_fields_set
    }
    given |= {name: extra[name] for name in _SHARED & extra.keys()}
    if response_format is None:
        return given
    if given.get("response_format") is not None:
        raise InvalidRequest(
            f"'{place}' and 'response_format' both say what the output must be", param=place
        )
    return given | {"response_format": response_format}


class Conversation:
    """The messages of a chat, made of what was said, thought and called, in order.

    Reasoning, text and calls of the assistant become one message as long as they come in this
    order. Instructions at the beginning become one message, of the role that all templates know.
    """

    def __init__(self) -> None:
        self.messages: list[Json] = []
        self._answer: Json | None = None  # of the assistant, open for more
        self.after_result = False  # nothing of the assistant's or the system's since then

    def instruct(self, text: str) -> None:
        """Add instructions."""
        self._answer, self.after_result = None, False
        if len(self.messages) == 1 and self.messages[0]["role"] == "system":
            text = "\n\n".join(part for part in (self.messages.pop()["content"], text) if part)
        self.messages.append({"role": "system", "content": text})

    def say(self, role: str, content: str | list[Json]) -> None:
        """Add a message of the user, or of another role but the assistant's."""
        self._answer = None
        self.after_result &= role == "user"
        self.messages.append({"role": role, "content": content})

    def answer(self, text: str) -> None:
        """Add text of the assistant."""
        self._open(unless=("content", "tool_calls"))["content"] = text

    def think(self, text: str) -> None:
        """Add reasoning of the assistant."""
        message = self._open(unless=("content", "tool_calls"))
        before = message.get("reasoning")
        message["reasoning"] = f"{before}\n{text}" if before else text

    def call(self, call_id: str, name: str, arguments: str | Json) -> None:
        """Add a call of the assistant's; arguments are JSON text or an object."""
        function = {"name": name, "arguments": arguments}
        calls = self._open().setdefault("tool_calls", [])
        calls.append({"id": call_id, "type": "function", "function": function})

    def result(self, call_id: str, content: str | list[Json]) -> None:
        """Add what a call returned."""
        self._answer, self.after_result = None, True
        self.messages.append({"role": "tool", "tool_call_id": call_id, "content": content})

    def _open(self, unless: tuple[str, ...] = ()) -> Json:
        """Return the open answer, or a new one if that has any of these keys."""
        if self._answer is None or any(key in self._answer for key in unless):
            self._answer, self.after_result = {"role": "assistant"}, False
            self.messages.append(self._answer)
        return self._answer


class Kind(Enum):
    """Kind of a block."""

    REASONING = auto()
    TEXT = auto()
    CALL = auto()


@dataclass(slots=True)
class Block:
    """Neighbouring text of one kind, or one call. `index` is its place in the output."""

    index: int
    kind: Kind
    name: str = ""  # of the function that is called
    pieces: list[str] = field(default_factory=list)
    closed: bool = False
    complete: bool = False  # it was not cut short

    @property
    def text(self) -> str:
        """The text so far; of a call, the JSON of its arguments."""
        if len(self.pieces) > 1:
            self.pieces = ["".join(self.pieces)]
        return self.pieces[0] if self.pieces else ""


class Opened(NamedTuple):
    block: Block


class Written(NamedTuple):
    """More of a block's text, which is part of it already."""

    block: Block
    text: str


class Closed(NamedTuple):
    block: Block


Change = Opened | Written | Closed


class Blocks:
    """The blocks of one output, as its events come."""

    def __init__(self) -> None:
        self.all: list[Block] = []

    def add(self, events: Iterable[Event], finish_reason: str | None = None) -> Iterator[Change]:
        """Yield what events change, each change made when it is yielded.

        With a finish reason they are the last ones: a block that is cut is incomplete.
        """
        for event in events:
            match event:
                case Reasoning(text):
                    yield from self._write(Kind.REASONING, text)
                case Content(text):
                    yield from self._write(Kind.TEXT, text)
                case ToolCallStart(_, name):
                    yield from self._open(Kind.CALL, name)
                case ToolArguments(_, text):
                    yield from self._write(Kind.CALL, text)
                case ToolCallEnd() if finish_reason not in CUT:
                    yield from self._close(complete=True)
                case ToolCallEnd():
                    pass  # the end of the output may have ended it
        if finish_reason is not None:
            if not self.all:  # an empty answer is no missing one
                yield from self._open(Kind.TEXT)
            yield from self._close(complete=finish_reason not in CUT)

    @property
    def _current(self) -> Block | None:
        return self.all[-1] if self.all and not self.all[-1].closed else None

    def _write(self, kind: Kind, text: str) -> Iterator[Change]:
        if not text:
            return
        block = self._current
        if block is None or block.kind is not kind:
            yield from self._open(kind)
            block = self.all[-1]
        block.pieces.append(text)
        yield Written(block, text)

    def _open(self, kind: Kind, name: str = "") -> Iterator[Change]:
        yield from self._close(complete=True)
        self.all.append(Block(len(self.all), kind, name))
        yield Opened(self.all[-1])

    def _close(self, *, complete: bool) -> Iterator[Change]:
        block = self._current
        if block is not None:
            block.closed, block.complete = True, complete
            yield Closed(block)
