"""Open requests and their readers."""

from __future__ import annotations

import asyncio
import contextlib
from array import array
from collections.abc import Iterable, Iterator

from surestep_common.errors import DeadlineExceeded, SurestepError

from surestep_scheduler.core.sequence import Output, Sequence, Tenancy

from .timeline import Timeline


class RequestOutputs:
    """The outputs of an open request that its reader has not taken yet; at most max_len tokens."""

    def __init__(self, seq: Sequence) -> None:
        self.seq = seq
        self.started = False  # the first chunk was sent
        self.timeline = Timeline(seq.arrival)
        self._outputs: list[Output] = []
        self._loop = asyncio.get_running_loop()  # asking for it each time is a call of the system
        self._waiting: asyncio.Future[None] | None = None
        self._late = False

    def put(self, output: Output) -> None:
        self._outputs.append(output)
        self._wake()

    async def get(self) -> list[Output]:
        """Wait for outputs; return all since the last call, at least one.

        Raises DeadlineExceeded when there are none and the request is late.
        """
        while not self._outputs:
            if self._late:
                raise DeadlineExceeded("the request's deadline has passed")
            self._waiting = self._loop.create_future()
            await self._waiting
        outputs, self._outputs = self._outputs, []
        return outputs

    @contextlib.contextmanager
    def within(self, time_remaining: float | None) -> Iterator[None]:
        """Let the request be late after so many seconds.

        One timer for all of its tokens: a timeout around each costs more than the token.
        """
        if time_remaining is None:
            yield
            return
        timer = self._loop.call_later(time_remaining, self._expire)
        try:
            yield
        finally:
            timer.cancel()

    def _expire(self) -> None:
        self._late = True
        self._wake()

    def _wake(self) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)


class OpenRequests:
    """The outputs of all open requests by id, until the output that ends each."""

    def __init__(self) -> None:
        self._by_id: dict[str, RequestOutputs] = {}

    def __getitem__(self, request_id: str) -> RequestOutputs:
        return self._by_id[request_id]

    def open(self, seq: Sequence) -> RequestOutputs:
        """Open a request."""
        opened = RequestOutputs(seq)
        self._by_id[seq.request.id] = opened
        return opened

    def close(self, opened: RequestOutputs) -> bool:
        """Close a request whose reader is gone. Returns False when it has ended already."""
        request_id = opened.seq.request.id
        if self._by_id.get(request_id) is not opened:
            return False
        del self._by_id[request_id]
        return True

    def admitted(self, tenancies: Iterable[Tenancy], now: float) -> None:
        """Note that these moved into slots."""
        for tenancy in tenancies:
            self._by_id[tenancy.seq.request.id].timeline.admitted(now)

    def lost(self, now: float) -> None:
        """Note that the workers are gone: requests that were in slots wait again."""
        for opened in self._by_id.values():
            opened.timeline.lost(now)

    def deliver(self, outputs: Iterable[Output]) -> None:
        """Hand outputs to the readers."""
        for output in outputs:
            request_id = output.seq.request.id
            self._by_id[request_id].put(output)
            if output.finish is not None or output.error is not None:
                del self._by_id[request_id]

    def fail(self, seq: Sequence, error: SurestepError) -> None:
        """End a request with an error."""
        self.deliver([Output(seq, array("I"), error=error)])
