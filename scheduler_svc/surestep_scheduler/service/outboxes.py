"""The streams on which callers get the chunks of many calls."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from surestep_common.errors import InvalidRequest
from surestep_common.request_bounds import check_name

from surestep_scheduler.engine.open_requests import Outbox


class Outboxes:
    """The outboxes of open calls of Deliver, by the caller's name for each."""

    def __init__(self) -> None:
        self._by_stream: dict[str, Outbox] = {}

    @contextlib.contextmanager
    def opened(self, stream_id: str) -> Iterator[Outbox]:
        """Open an outbox until the end of the block. Raises InvalidRequest, RequestTooLarge."""
        check_name("stream_id", stream_id)
        if not stream_id or stream_id in self._by_stream:
            raise InvalidRequest("a stream needs an id of its own", param="stream_id")
        outbox = self._by_stream[stream_id] = Outbox()
        try:
            yield outbox
        finally:
            del self._by_stream[stream_id]

    def named(self, stream_id: str) -> Outbox | None:
        """Return that of an open stream; None if there is no such stream."""
        return self._by_stream.get(stream_id)
