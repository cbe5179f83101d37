"""Where the chunks of a call go: to the call itself, or to the stream of Deliver that it names."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from surestep_common.errors import InvalidRequest, Unavailable
from surestep_common.request_bounds import check_name
from surestep_proto.scheduler_pb2 import GenerateRequest

from surestep_scheduler.engine.open_requests import Outbox


class Outboxes:
    """Those of the open calls of Deliver, by the caller's name."""

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

    def of(self, request: GenerateRequest) -> Outbox:
        """Return the one that a request names, or a new one. Raises Unavailable."""
        if not request.HasField("delivery"):
            return Outbox()
        outbox = self._by_stream.get(request.delivery.stream_id)
        if outbox is None:
            raise Unavailable("the stream that the chunks should go to is not open")
        return outbox
