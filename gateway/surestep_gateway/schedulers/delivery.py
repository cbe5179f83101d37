"""The stream on which a scheduler sends the chunks of all calls, one message per step.

A message for each token of each call costs either side more than the token itself. A scheduler
without such a stream, of another release or while it comes back, sends chunks by the calls.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from typing import Any

import grpc
from surestep_common.errors import ConnectionLost
from surestep_proto import scheduler_pb2 as pb

RETRY_S = 0.1  # until a stream that broke is opened again
_RETRY_UNKNOWN_S = 5.0  # where the scheduler does not know the method


class DeliveryStream:
    """Keeps the stream of one scheduler open. `run` must be running."""

    def __init__(
        self,
        stub: Any,
        on_batch: Callable[[pb.ChunkBatch], None],
        on_loss: Callable[[ConnectionLost], None],
    ) -> None:
        """`on_loss`: chunks of the calls that named the stream may have been lost with it."""
        self._stub = stub
        self._on_batch = on_batch
        self._on_loss = on_loss
        self._id = ""  # of the stream while it is open

    def of(self, call: int) -> pb.Delivery | None:
        """Return what a request says of its chunks; None while they must come by the call."""
        return pb.Delivery(stream_id=self._id, call=call) if self._id else None

    async def run(self) -> None:
        """Open the stream again and again until cancelled."""
        while True:
            pause_s, why = RETRY_S, "the scheduler ended the stream of chunks"
            try:
                await self._read()
            except grpc.aio.AioRpcError as error:
                why = error.details() or error.code().name
                if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                    pause_s = _RETRY_UNKNOWN_S
            if self._id:
                self._id = ""
                self._on_loss(ConnectionLost(why))
            await asyncio.sleep(pause_s)

    async def _read(self) -> None:
        stream_id = secrets.token_hex(16)  # others must not be able to name it
        async for batch in self._stub.Deliver(pb.DeliverRequest(stream_id=stream_id)):
            self._id = stream_id
            self._on_batch(batch)
