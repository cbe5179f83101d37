"""Ask the gRPC service at an address for any answer at all."""

from __future__ import annotations

from typing import Any, Self

import grpc
from grpc_health.v1 import health_pb2

from . import access, rpc

_CHECK = f"/{health_pb2.DESCRIPTOR.services_by_name['Health'].full_name}/Check"
_SILENCE = frozenset({grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNAVAILABLE})


class HealthProbe:
    """Asks the method of the secret, where no stranger waits, or the health service without one.

    TLS and the secret are those of `access.use`.
    """

    def __init__(self, address: str) -> None:
        self._channel = rpc.connect(address)
        self._ask: Any = self._channel.unary_unary(access.alive_method() or _CHECK, bytes, bytes)

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
            await self._ask(b"", timeout=timeout_s, wait_for_ready=True)
        except grpc.aio.AioRpcError as error:
            return error.code() not in _SILENCE
        return True
