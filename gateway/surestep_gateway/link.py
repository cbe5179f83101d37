"""The gateway's connection to a scheduler."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import Any, TypeAlias

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from surestep_common.errors import Unavailable
from surestep_common.rpc import connect, translate_errors
from surestep_proto import generate_pb2, generate_pb2_grpc

logger = logging.getLogger(__name__)

Call: TypeAlias = (
    "grpc.aio.UnaryStreamCall[generate_pb2.GenerateRequest, generate_pb2.GenerateChunk]"
)

SERVICE = generate_pb2.DESCRIPTOR.services_by_name["Scheduler"].full_name
_RETRY_S = 0.1
_QUERY_TIMEOUT_S = 2.0
_RETRY_AFTER_S = 1.0  # what a client is told while there is nothing better to say


class SchedulerLink:
    """One channel, and whether the scheduler behind it serves. `watch` must be running."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.connected = False  # the scheduler answers, whatever it says
        self._serving = asyncio.Event()
        self._info: generate_pb2.SchedulerInfo | None = None
        self._channel = connect(address)
        self._stub: Any = generate_pb2_grpc.SchedulerStub(self._channel)
        self._health: Any = health_pb2_grpc.HealthStub(self._channel)
        self._watching: grpc.aio.UnaryStreamCall[Any, Any] | None = None

    async def close(self) -> None:
        """Close the channel; open calls are cancelled."""
        await self._channel.close(None)

    @property
    def serving(self) -> bool:
        """Whether the scheduler admits requests, as far as known."""
        return self._serving.is_set()

    @property
    def known(self) -> bool:
        """Whether `info` has been answered."""
        return self._info is not None

    @property
    def info(self) -> generate_pb2.SchedulerInfo:
        """Facts of the served model. Raises Unavailable before they were ever known."""
        if self._info is None:
            raise Unavailable("the model is not ready yet", retry_after=_RETRY_AFTER_S)
        return self._info

    async def watch(self) -> None:
        """Follow the scheduler's health until cancelled."""
        while True:
            with contextlib.suppress(grpc.aio.AioRpcError, asyncio.CancelledError):
                await self._watch_once()
            if (task := asyncio.current_task()) is not None and task.cancelling():
                raise asyncio.CancelledError
            self._set_serving(False)
            self.connected = False
            await asyncio.sleep(_RETRY_S)

    async def _watch_once(self) -> None:
        self._watching = self._health.Watch(health_pb2.HealthCheckRequest(service=SERVICE))
        async for reply in self._watching:
            self.connected = True
            serving = reply.status == health_pb2.HealthCheckResponse.SERVING
            if serving:
                self._info = await self._stub.Info(
                    generate_pb2.SchedulerInfoRequest(), timeout=_QUERY_TIMEOUT_S
                )
            self._set_serving(serving)

    def _set_serving(self, serving: bool) -> None:
        if serving != self.serving:
            logger.info("scheduler %s %s", self.address, "serves" if serving else "does not serve")
        if serving:
            self._serving.set()
        else:
            self._serving.clear()

    def recheck(self) -> None:
        """A call failed: not serving until the scheduler says again that it does."""
        if self.serving and self._watching is not None:
            self._set_serving(False)
            self._watching.cancel()

    async def wait_until_serving(self, timeout_s: float) -> None:
        """Raises Unavailable when the scheduler does not serve within the time."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._serving.wait()
        except TimeoutError:
            raise Unavailable(
                "the scheduler did not come back in time", retry_after=_RETRY_AFTER_S
            ) from None

    def generate(self, request: generate_pb2.GenerateRequest, timeout_s: float) -> Call:
        """Open a Generate call. The caller must cancel it when done."""
        call: Call = self._stub.Generate(request, timeout=timeout_s)
        return call

    async def stats(self) -> generate_pb2.SchedulerStats:
        """Counters and gauges. Raises SurestepError when the scheduler does not answer."""
        with translate_errors():
            stats: generate_pb2.SchedulerStats = await self._stub.Stats(
                generate_pb2.StatsRequest(), timeout=_QUERY_TIMEOUT_S
            )
        return stats

    async def status(self) -> generate_pb2.SchedulerStatus:
        """Processes behind the scheduler. Raises SurestepError when it does not answer."""
        with translate_errors():
            status: generate_pb2.SchedulerStatus = await self._stub.Status(
                generate_pb2.SchedulerStatusRequest(), timeout=_QUERY_TIMEOUT_S
            )
        return status
