"""Whether the gRPC service at an address answers anything at all."""

from __future__ import annotations

from typing import Any, Self

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from . import rpc

_SILENCE = frozenset({grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNAVAILABLE})


class HealthProbe:
    """Asks the health service, with TLS where `tls.use` was called."""

    def __init__(self, address: str) -> None:
        self._channel = rpc.connect(address)
        self._stub: Any = health_pb2_grpc.HealthStub(self._channel)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the channel."""
        await self._channel.close(None)

    async def answers(self, timeout_s: float) -> bool:
        """Return whether an answer came in time, whatever it says."""
        try:
            await self._stub.Check(
                health_pb2.HealthCheckRequest(), timeout=timeout_s, wait_for_ready=True
            )
        except grpc.aio.AioRpcError as error:
            return error.code() not in _SILENCE
        return True
