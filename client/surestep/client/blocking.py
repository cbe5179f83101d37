"""The client for programs without an event loop."""

from __future__ import annotations

import time
from collections.abc import Generator, Sequence
from contextlib import closing
from types import TracebackType
from typing import Any, Self, Unpack

import grpc
from surestep_common.errors import SurestepError
from surestep_common.rpc import from_rpc_error
from surestep_proto.sampling_pb2 import SamplingParams
from surestep_proto.scheduler_pb2 import GenerateChunk, SchedulerInfo, SchedulerInfoRequest
from surestep_proto.scheduler_pb2_grpc import SchedulerStub

from . import connection
from .completion import Completion
from .connection import Tls
from .request import Options, ResumableRequest


class Client:
    """A connection to one scheduler, for any number of threads. Close it, or use `with`."""

    def __init__(
        self,
        address: str,
        *,
        api_key: str | None = None,
        tls: Tls | None = None,
        retry_for_s: float = 60.0,
    ) -> None:
        """`address` is host:port, `api_key` one of the server's --grpc-api-key.

        Requests are resumed after losses of the server for `retry_for_s` without a token; 0 =
        never. Raise InvalidRequest for a malformed address or key, and OSError for certificates
        that cannot be read.
        """
        self._metadata = connection.metadata(api_key)
        self._retry_for_s = retry_for_s
        where, options = connection.target(address), connection.options(tls)
        if tls is None:
            self._channel = grpc.insecure_channel(where, options)
        else:
            self._channel = grpc.secure_channel(where, tls.credentials(), options)
        self._stub: Any = SchedulerStub(self._channel)

    def stream(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingParams | None = None,
        **options: Unpack[Options],
    ) -> Generator[GenerateChunk, None, None]:
        """Yield chunks as they come: the first has `start`, the last `finish_reason` and `end`.

        Closing the iterator aborts the request. Raise the SurestepError that ends it.
        """
        begin, retry_for_s = time.monotonic(), self._retry_for_s
        request = ResumableRequest(
            prompt_ids, sampling, options, retry_for_s=retry_for_s, now=begin
        )
        return self._chunks(request)

    def _chunks(self, request: ResumableRequest) -> Generator[GenerateChunk, None, None]:
        while True:
            try:
                with closing(self._call(request)) as chunks:
                    yield from chunks
                return
            except SurestepError as error:
                time.sleep(request.pause_s(error, time.monotonic()))

    def _call(self, request: ResumableRequest) -> Generator[GenerateChunk, None, None]:
        message, timeout_s = request.next_call(time.monotonic())
        call = self._stub.Generate(message, timeout=timeout_s, metadata=self._metadata)
        chunk = None
        try:
            for chunk in call:
                yield request.record(chunk, time.monotonic())
        except grpc.RpcError as error:
            raise from_rpc_error(error) from error
        finally:
            call.cancel()
        request.check_ended(chunk)

    def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingParams | None = None,
        **options: Unpack[Options],
    ) -> Completion:
        """Return the whole output. Raise the SurestepError that the request ends with."""
        completion = Completion()
        for chunk in self.stream(prompt_ids, sampling, **options):
            completion.add(chunk)
        return completion

    def info(self, timeout_s: float = 5.0) -> SchedulerInfo:
        """Return facts of the served model. Raise Unavailable while none is served, and others."""
        try:
            info: SchedulerInfo = self._stub.Info(
                SchedulerInfoRequest(), timeout=timeout_s, metadata=self._metadata
            )
        except grpc.RpcError as error:
            raise from_rpc_error(error) from error
        return info

    def close(self) -> None:
        """Close the connection; open requests are aborted."""
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
