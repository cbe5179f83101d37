"""The streams on which a fake scheduler sends the chunks of many calls."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
from surestep_common.errors import Unavailable
from surestep_proto.scheduler_pb2 import (
    ChunkBatch,
    DeliverRequest,
    GenerateChunk,
    GenerateRequest,
)


class Deliveries:
    """One chunk per message. With `known` off there are no such streams, as in older releases."""

    def __init__(self, *, known: bool = True) -> None:
        self._known = known
        self._outboxes: dict[str, asyncio.Queue[ChunkBatch | None]] = {}

    async def send(self, request: GenerateRequest, chunk: GenerateChunk) -> None:
        """Send a chunk; its call must not end before."""
        outbox = self._outboxes[request.delivery.stream_id]
        await outbox.put(ChunkBatch(calls=[request.delivery.call], chunks=[chunk]))
        await outbox.join()

    async def batches(self, request: DeliverRequest, context: Any) -> AsyncIterator[ChunkBatch]:
        """What a call of Deliver answers."""
        if not self._known:
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, "Method not found!")
        outbox = self._outboxes[request.stream_id] = asyncio.Queue()
        yield ChunkBatch()
        while (batch := await outbox.get()) is not None:
            outbox.task_done()  # the call may end now, behind the chunk: it is sent without a wait
            yield batch
        raise Unavailable("the stream broke")

    async def break_all(self) -> None:
        """Lose the streams, and nothing else."""
        outboxes, self._outboxes = self._outboxes, {}
        for outbox in outboxes.values():
            await outbox.put(None)
