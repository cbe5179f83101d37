"""Blocks: the parts of one output, as APIs that give an answer as a list of parts have them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import NamedTuple

from surestep_gateway.parsers import (
    Content,
    Event,
    Reasoning,
    ToolArguments,
    ToolCallEnd,
    ToolCallStart,
)


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

        With a finish reason they are the last ones: the block that `length` cuts is incomplete.
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
                case ToolCallEnd() if finish_reason != "length":
                    yield from self._close(complete=True)
                case ToolCallEnd():
                    pass  # the end of the output may have ended it
        if finish_reason is not None:
            if not self.all:  # an empty answer is no missing one
                yield from self._open(Kind.TEXT)
            yield from self._close(complete=finish_reason != "length")

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
