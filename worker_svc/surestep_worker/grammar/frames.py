"""Messages between a rank and its grammars' processes: JSON and masks behind a length.

Both trust the other no further than that: a process runs native code on the text of clients.
"""

from __future__ import annotations

import json
import selectors
import socket
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import numpy as np
from surestep_common.errors import InvalidRequest, SurestepError, UnsupportedParameter

from .window import Ask, Window

_LENGTH = struct.Struct("<II")  # bytes of the JSON, and of what lies behind it
_ERRORS = {kind.__name__: kind for kind in (InvalidRequest, UnsupportedParameter)}


class Begin(NamedTuple):
    """Start of following a request."""

    begins_after: Sequence[int]
    stop_ids: Sequence[int]
    min_tokens: int


class Question(NamedTuple):
    """Asks for the next window of a request, which has a key of its own."""

    key: int
    begin: Begin | None  # None: it has begun in this process
    ask: Ask


@dataclass(slots=True, eq=False)
class Frames:
    """A connected socket; blocks."""

    _socket: socket.socket

    def close(self) -> None:
        """Hang up."""
        self._socket.close()

    def fileno(self) -> int:
        """Return the descriptor, so that one can wait for an answer."""
        return self._socket.fileno()

    def send(self, told: Any, behind: bytes = b"") -> None:
        """Send what JSON can tell, and bytes. Raises OSError."""
        head = json.dumps(told).encode()
        self._socket.sendall(_LENGTH.pack(len(head), len(behind)) + head + behind)

    def receive(self) -> tuple[Any, bytes]:
        """Return what the other side has sent. Raises EOFError, OSError and ValueError."""
        head, behind = _LENGTH.unpack(self._read(_LENGTH.size))
        return json.loads(self._read(head)), self._read(behind)

    def receive_within(self, timeout_s: float) -> tuple[Any, bytes]:
        """Return the same. Raises TimeoutError if it does not begin to come in time."""
        self._socket.settimeout(max(timeout_s, 0.001))
        try:
            first = self._socket.recv(1, socket.MSG_PEEK)
        finally:
            self._socket.settimeout(None)
        if not first:
            raise EOFError
        return self.receive()

    def _read(self, size: int) -> bytes:
        data = bytearray(size)
        view = memoryview(data)
        while view:
            count = self._socket.recv_into(view)
            if not count:
                raise EOFError
            view = view[count:]
        return bytes(data)


def wait(frames: Iterable[Frames], timeout_s: float) -> list[Frames]:
    """Return those that have something to receive, or have ended; none when the time is over."""
    with selectors.PollSelector() as selector:
        for each in frames:
            selector.register(each, selectors.EVENT_READ)
        found = selector.select(max(timeout_s, 0.0))
    return [cast("Frames", key.fileobj) for key, _ in found]


def told_of_error(error: SurestepError) -> list[str]:
    """Return what JSON tells of the error of a grammar."""
    kind = type(error).__name__ if type(error).__name__ in _ERRORS else InvalidRequest.__name__
    return [kind, error.message]


def error_of(told: list[str]) -> SurestepError:
    """Return that error."""
    kind, message = told
    return _ERRORS.get(kind, InvalidRequest)(message, param="grammar")


def questions_of(told: Any) -> tuple[list[int], list[Question]]:
    """Return the keys that are forgotten, and the questions; tuples are lists in JSON."""
    forgotten, asked = told
    return forgotten, [
        Question(key, begin and Begin(*begin), Ask(*ask)) for key, begin, ask in asked
    ]


def told_of_windows(windows: Sequence[Window]) -> tuple[list[Any], bytes]:
    """Return what JSON tells of windows, and their masks one behind the other."""
    heads = [[w.drafts, w.num_forced, w.first, len(w.masks), w.fault] for w in windows]
    return heads, b"".join(mask.tobytes() for window in windows for mask in window.masks)


def windows_of(heads: list[Any], behind: bytes, num_words: int) -> list[Window]:
    """Return those windows. Raises ValueError if the masks are not of so many words."""
    masks = np.frombuffer(behind, dtype=np.int32).reshape(-1, num_words)
    windows, first = list[Window](), 0
    for drafts, num_forced, begins, count, fault in heads:
        own = [mask.copy() for mask in masks[first : first + count]]
        windows.append(Window(drafts, num_forced, begins, own, fault))
        first += count
    if first != len(masks):
        raise ValueError("more or fewer masks than windows tell of")
    return windows
