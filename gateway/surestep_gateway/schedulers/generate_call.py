"""One call of Generate: its chunks, its errors and how long each may take."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, TypeAlias

import grpc
from surestep_common.errors import ConnectionLost, InternalError
from surestep_common.rpc import from_rpc_error
from surestep_proto import scheduler_pb2 as pb

if TYPE_CHECKING:
    from .scheduler_client import SchedulerClient

_Stream: TypeAlias = "grpc.aio.UnaryStreamCall[pb.GenerateRequest, pb.GenerateChunk]"


class GenerateCall:
    """One call of Generate, made by `SchedulerClient.generate`."""

    def __init__(self, scheduler: SchedulerClient, stream: _Stream, number: int) -> None:
        self._scheduler = scheduler
        self._stream = stream
        self.number = number
        self.has_tokens = False
        self.lost_alone = False  # no other call without tokens was open when this one was lost
        self._given_up = False
        self._clock = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._due: float | None = None  # while it is being read
        self._late = False

    async def read(self, due: float) -> pb.GenerateChunk:
        """Return the next chunk. Raise the scheduler's error, ConnectionLost, or TimeoutError at
        `due`, by the event loop's clock; the call is then over.
        """
        self._due = due
        # The timer is set anew when it rings, not with every token: that would cost more than they.
        if self._timer is None or due < self._timer.when():
            self._set_timer(due)
        try:
            chunk = await self._read()
        except (ConnectionLost, InternalError) as error:
            if isinstance(error, ConnectionLost):
                self.lost_alone = self._scheduler.is_lost_alone(self)
            self._scheduler.breaker.failed(self.number, time.monotonic())
            raise
        finally:
            self._due = None
        self._scheduler.heard()
        if chunk.token_ids or chunk.pooled:
            self.has_tokens = True
            self._scheduler.breaker.worked(self.number)
        return chunk

    async def _read(self) -> pb.GenerateChunk:
        try:
            chunk = await self._stream.read()
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            if self._late:
                raise TimeoutError from None
            if not self._given_up:
                raise
            raise ConnectionLost("the scheduler does not answer") from None
        if not isinstance(chunk, pb.GenerateChunk):  # end of the stream
            raise ConnectionLost("the scheduler ended the stream early")
        return chunk

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
        self._late = True
        self._stream.cancel()

    def give_up(self) -> None:
        """Cancel the call, so that `read` raises ConnectionLost."""
        self._given_up = True
        self._stream.cancel()

    def close(self) -> None:
        """Abort the request unless it is over."""
        if self._timer is not None:
            self._timer.cancel()
        self._stream.cancel()
        self._scheduler.breaker.ended(self.number)
