"""Call of Generate: its chunks, its errors and how long each may take.

A scheduler sends the chunks of all calls on one stream, one message per step: a message for each
token of each call costs either side more than the token itself. A scheduler without such a stream,
of another release or while it comes back, sends chunks by the calls.
"""

from __future__ import annotations

import asyncio
import math
import secrets
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

import grpc
from surestep_common.errors import ConnectionLost, InternalError, SurestepError
from surestep_common.rpc import from_rpc_error, num_delivered
from surestep_proto import scheduler_pb2 as pb

if TYPE_CHECKING:
    from surestep_gateway.schedulers.scheduler_client import SchedulerClient

_Stream: TypeAlias = "grpc.aio.UnaryStreamCall[pb.GenerateRequest, pb.GenerateChunk]"

_MOST_CHUNKS = 64  # unread, until those that come are merged: a client that hardly reads costs ids


class GenerateCall:
    """Call of Generate, made by `SchedulerClient.generate`.

    Its chunks come by `put`: from its own stream, or from the one that the scheduler sends the
    chunks of all calls on. What ends it comes by `fail`.
    """

    def __init__(
        self,
        scheduler: SchedulerClient,
        stream: _Stream,
        number: int,
        tasks: asyncio.TaskGroup,
        *,
        delivered: bool,
    ) -> None:
        """`delivered`: its chunks come by the scheduler's stream for all calls. One of the `tasks`
        becomes what reads its own, until `close`.
        """
        self._scheduler = scheduler
        self._stream = stream
        self.number = number
        self.delivered = delivered
        self.has_tokens = False
        self.lost_alone = False  # no other call without tokens was open when this one was lost
        self._chunks: deque[pb.GenerateChunk] = deque()  # that were not read yet
        self._num_chunks = 0  # that came
        self._error: Exception | None = None  # what ended it
        self._error_behind = math.inf  # chunks that come before this error
        self._clock = asyncio.get_running_loop()
        self._waiting: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._due: float | None = None  # while it is being read
        self._timeout_s = 0.0  # that the read had, and has again when a pause is over
        self._closed = False
        self._following = tasks.create_task(self._follow())

    async def read(self, due: float) -> pb.GenerateChunk:
        """Return the next chunk. Raise the scheduler's error, ConnectionLost, or TimeoutError at
        `due`, by the event loop's clock; the call is then over.
        """
        while not self._chunks:
            if self._error is not None and self._num_chunks >= self._error_behind:
                raise self._failure(self._error)
            await self._wait(due)
        return self._chunks.popleft()

    async def _wait(self, due: float) -> None:
        self._due, self._timeout_s = due, max(due - self._clock.time(), 0.0)
        # The timer is set anew when it rings, not with every token: that would cost more than they.
        if self._timer is None or due < self._timer.when():
            self._set_timer(due)
        self._waiting = self._clock.create_future()
        try:
            await self._waiting
        finally:
            self._due = None

    def _failure(self, error: Exception) -> Exception:
        if isinstance(error, ConnectionLost):
            self.lost_alone = self._scheduler.is_lost_alone(self)
        if isinstance(error, ConnectionLost | InternalError):
            self._scheduler.breaker.failed(self.number, time.monotonic())
        return error

    def put(self, chunk: pb.GenerateChunk) -> None:
        """Take in a chunk."""
        self._num_chunks += 1
        if chunk.token_ids or chunk.pooled:
            self.has_tokens = True
            self._scheduler.breaker.worked(self.number)
        if len(self._chunks) < _MOST_CHUNKS:
            self._chunks.append(chunk)
        else:
            _append(self._chunks[-1], chunk)
        self._wake()

    def fail(self, error: Exception, behind: int = 0) -> None:
        """End the call; `read` raises the first error when it has returned every chunk.

        `behind`: so many chunks come, although the error of a call may overtake those delivered.
        """
        self._error = self._error or error
        self._error_behind = min(self._error_behind, behind)
        self._wake()

    def _wake(self) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    async def _follow(self) -> None:
        """Read the call's own stream to its end. It has no chunks if they are delivered."""
        try:
            async for chunk in self._stream:
                self._scheduler.heard()
                self.put(chunk)
        except grpc.aio.AioRpcError as error:
            self.fail(_as_clients_know(from_rpc_error(error)), num_delivered(error))
        except asyncio.CancelledError:
            if not self._closed:  # but the channel is
                self.fail(ConnectionLost("the call was cancelled"))
            raise
        except Exception as error:  # noqa: BLE001  # whatever it is, the reader gets it
            self.fail(error)
        else:
            if not self.delivered:  # if they are, the last one may still be on its way
                self.fail(ConnectionLost("the scheduler ended the stream early"))

    def _set_timer(self, due: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._clock.call_at(due, self._ring)

    def _ring(self) -> None:
        self._timer = None
        if self._due is None:  # the next read sets it
            return
        if self._clock.time() < self._due:
            self._set_timer(self._due)
            return
        if self._scheduler.paused:  # which ends the call itself at the request's deadline
            self._due = self._clock.time() + self._timeout_s
            self._set_timer(self._due)
            return
        self.fail(TimeoutError())

    def close(self) -> None:
        """Abort the request unless it is over."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        self._following.cancel()
        self._stream.cancel()
        self._scheduler.breaker.ended(self.number)


def _as_clients_know(error: SurestepError) -> SurestepError:
    """Return a scheduler's error without a field that no client sends: several make a grammar."""
    if error.param == "grammar":
        error.param = None
    return error


def _append(chunk: pb.GenerateChunk, later: pb.GenerateChunk) -> None:
    """Append the tokens of the next chunk of a call, and all that it says."""
    first_row, num_rows = len(chunk.token_ids), len(chunk.logprobs.row)
    num_weights = len(chunk.weights)
    chunk.MergeFrom(later)
    for weights in chunk.weights[num_weights:]:
        weights.first_token += first_row
    for place in range(num_rows, len(chunk.logprobs.row)):
        chunk.logprobs.row[place] += first_row


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
