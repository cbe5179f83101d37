"""The client for programs with an event loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from types import TracebackType
from typing import Any, Self, Unpack

import grpc
from surestep_common.errors import SurestepError
from surestep_common.rpc import translate_errors
from surestep_proto.sampling_pb2 import SamplingParams
from surestep_proto.scheduler_pb2 import GenerateChunk, SchedulerInfo, SchedulerInfoRequest
from surestep_proto.scheduler_pb2_grpc import SchedulerStub

from . import connection
from .completion import Completion
from .connection import Tls
from .request import Options, ResumableRequest


class AsyncClient:
    """A connection to one scheduler, of one event loop. Close it, or use `async with`."""

    def __init__(
        self,
        address: str,
        *,
        api_key: str | None = None,
        tls: Tls | None = None,
        retry_for_s: float = 60.0,
    ) -> None:
        """Connect as `Client` does; needs a running event loop."""
        self._metadata = connection.metadata(api_key)
        self._retry_for_s = retry_for_s
        where, options = connection.target(address), connection.options(tls)
        if tls is None:
            self._channel = grpc.aio.insecure_channel(where, options)
        else:
            self._channel = grpc.aio.secure_channel(where, tls.credentials(), options)
        self._stub: Any = SchedulerStub(self._channel)

    async def stream(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingParams | None = None,
        **options: Unpack[Options],
    ) -> AsyncGenerator[GenerateChunk, None]:
        """Yield chunks as `Client.stream` does. Cancelling the reading task, or closing, aborts."""
        begin, retry_for_s = time.monotonic(), self._retry_for_s
        request = ResumableRequest(
            prompt_ids, sampling, options, retry_for_s=retry_for_s, now=begin
        )
        while True:
            try:
                async with aclosing(self._call(request)) as chunks:
                    async for chunk in chunks:
                        yield chunk
                return
            except SurestepError as error:
                await asyncio.sleep(request.pause_s(error, time.monotonic()))

    async def _call(self, request: ResumableRequest) -> AsyncGenerator[GenerateChunk, None]:
        message, timeout_s = request.next_call(time.monotonic())
        call = self._stub.Generate(message, timeout=timeout_s, metadata=self._metadata)
        chunk = None
        try:
            with translate_errors():
                async for chunk in call:
                    yield request.record(chunk, time.monotonic())
        finally:
            call.cancel()
        request.check_ended(chunk)

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingParams | None = None,
        **options: Unpack[Options],
    ) -> Completion:
        """Return the whole output. Raise the SurestepError that the request ends with."""
        completion = Completion()
        async with aclosing(self.stream(prompt_ids, sampling, **options)) as chunks:
            async for chunk in chunks:
                completion.add(chunk)
        return completion

    async def info(self, timeout_s: float = 5.0) -> SchedulerInfo:
        """Return facts of the served model. Raise Unavailable while none is served, and others."""
        with translate_errors():
            info: SchedulerInfo = await self._stub.Info(
                SchedulerInfoRequest(), timeout=timeout_s, metadata=self._metadata
            )
        return info

    async def close(self) -> None:
        """Close the connection; open requests are aborted."""
        await self._channel.close(None)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()
