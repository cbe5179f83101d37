"""Event streams of the OpenAI API: their events, and the reason why one ended early."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from http import HTTPStatus
from typing import Any

from surestep_common.errors import Unavailable

from .http import message_in, message_of

_DATA, _DONE = b"data:", b"[DONE]"
UNFINISHED = "the stream ended without [DONE]"


class StreamEnded(Unavailable):
    """Early end of a stream: `kind` in few words, `detail` in the server's or the library's."""

    def __init__(self, kind: str, detail: str = "", status: int = HTTPStatus.OK) -> None:
        super().__init__(f"{kind}: {detail}" if detail else kind)
        self.kind, self.detail, self.status = kind, detail, status

    @classmethod
    def refused(cls, status: int, body: str) -> StreamEnded:
        """Read the response to a request that was not answered with a stream."""
        return cls(f"HTTP {status}", message_in(body), status)

    @classmethod
    def because(cls, error: Exception) -> StreamEnded:
        """Name the error of a library."""
        return cls(
            "timeout" if isinstance(error, TimeoutError) else type(error).__name__, str(error)
        )


class EventReader:
    """Reader of a stream's lines, wherever they come from."""

    def __init__(self) -> None:
        self._done = False

    def feed(self, line: bytes) -> dict[str, Any] | None:
        """Return the event in a line, None where there is none. Raise StreamEnded."""
        if not line.startswith(_DATA):
            return None
        payload = line[len(_DATA) :].strip()
        if payload == _DONE:
            self._done = True
            return None
        try:
            event = json.loads(payload)
        except ValueError as error:
            raise StreamEnded.because(error) from error
        if not isinstance(event, dict):
            raise StreamEnded("no event", payload.decode(errors="replace"))
        if event.get("error"):
            raise StreamEnded("error in the stream", message_of(event))
        return event

    def end(self) -> None:
        """Raise StreamEnded when there was no [DONE]."""
        if not self._done:
            raise StreamEnded(UNFINISHED)


def events(lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    """Yield the events of a whole stream. Raise StreamEnded."""
    reader = EventReader()
    for line in lines:
        if (event := reader.feed(line)) is not None:
            yield event
    reader.end()
