"""Kinds of requests to prepare: how each is drafted, and how its result crosses processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

from surestep_proto.scheduler_pb2 import SchedulerInfo

from .text_processor import TextProcessor
from .tokenizer import Texts
from .wire import Parts

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Draft(Generic[T]):
    """The work left once the texts have been encoded."""

    texts: Texts
    finish: Callable[[Sequence[list[int]]], T]  # takes the ids of each text


Kind = Callable[[TextProcessor, bytes | bytearray, SchedulerInfo], Draft[T]]


class Job(NamedTuple, Generic[T]):
    """A kind of request."""

    name: bytes
    draft: Kind[T]
    dump: Callable[[T], Parts]
    load: Callable[[Sequence[bytes]], T]


def dump_bytes(answer: bytes) -> Parts:
    """Serialise a result that is bytes already."""
    return [answer]


def load_bytes(parts: Sequence[bytes]) -> bytes:
    """Return such a result."""
    return parts[0]
