"""Open requests and their readers."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Iterable

from surestep_common.errors import SurestepError

from surestep_scheduler.core.sequence import Output, Sequence, Tenancy

from .timeline import Timeline


class RequestOutputs:
    """The outputs of an open request that its reader has not taken yet; at most max_len tokens."""

    def __init__(self, seq: Sequence) -> None:
        self.seq = seq
        self.started = False  # the first chunk was sent
        self.timeline = Timeline(seq.arrival)
        self._outputs: asyncio.Queue[Output] = asyncio.Queue()

    def put(self, output: Output) -> None:
        self._outputs.put_nowait(output)

    async def get(self) -> list[Output]:
        """Wait for outputs; return all since the last call, at least one."""
        outputs = [await self._outputs.get()]
        while not self._outputs.empty():
            outputs.append(self._outputs.get_nowait())
        return outputs


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
