"""Endpoints for operators: health, metrics, load, status."""

from __future__ import annotations

import os
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from google.protobuf.json_format import MessageToDict
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from surestep_common.errors import SurestepError, Unavailable
from surestep_proto.generate_pb2 import SchedulerStats, SchedulerStatus

from .context import Gateway
from .errors import JsonResponse


def package_version() -> str:
    """Version of the installed distribution, or a stand-in for a source tree."""
    try:
        return version("surestep")
    except PackageNotFoundError:
        return "0+source"


class OperatorRoutes:
    """Handlers bound to one gateway. None of them needs a key."""

    def __init__(self, gateway: Gateway, address: str) -> None:
        self._gateway = gateway
        self._address = address
        self._version = package_version()

    def routes(self) -> list[Route]:
        """What to mount."""
        return [
            Route("/health", self.health),
            Route("/health/ready", self.ready),
            Route("/ping", self.health, methods=["GET", "POST"]),
            Route("/version", self.version),
            Route("/metrics", self.metrics),
            Route("/load", self.load),
            Route("/status", self.status),
        ]

    async def health(self, request: Request) -> Response:
        """Alive: this process answers."""
        return Response()

    async def ready(self, request: Request) -> Response:
        """Ready: requests sent now would be served."""
        if self._gateway.admission.draining:
            raise Unavailable("the server is shutting down")
        if not self._gateway.link.serving:
            raise Unavailable("the model is not ready")
        return Response()

    async def version(self, request: Request) -> Response:
        """Version of the gateway."""
        return JsonResponse({"version": self._version})

    async def metrics(self, request: Request) -> Response:
        """Prometheus text; the gateway's own part even when the scheduler is silent."""
        stats = await self._stats()
        link = self._gateway.link
        text = self._gateway.metrics.render(stats, link.info if stats and link.known else None)
        return Response(text, headers={"content-type": CONTENT_TYPE_LATEST})

    async def load(self, request: Request) -> Response:
        """Requests open here (vLLM's `server_load`) and the scheduler's load."""
        load: dict[str, Any] = {"server_load": self._gateway.admission.num_open}
        stats = await self._stats()
        if stats is not None:
            load |= {
                "num_running": stats.num_running,
                "num_waiting": stats.num_waiting,
                "kv_cache_usage": stats.num_blocks_used / max(1, stats.num_blocks_total),
            }
        return JsonResponse(load)

    async def status(self, request: Request) -> Response:
        """Every process behind this gateway, for `surestep status`."""
        scheduler = await self._scheduler_status()
        return JsonResponse(
            {
                "gateway": {
                    "pid": os.getpid(),
                    "address": self._address,
                    "state": self._state(),
                    "version": self._version,
                    "scheduler_address": self._gateway.link.address,
                    "open_requests": self._gateway.admission.num_open,
                },
                "scheduler": None if scheduler is None else _as_json(scheduler),
            }
        )

    def _state(self) -> str:
        if self._gateway.admission.draining:
            return "DRAINING"
        return "SERVING" if self._gateway.link.serving else "WAITING_FOR_SCHEDULER"

    async def _stats(self) -> SchedulerStats | None:
        try:
            return await self._gateway.link.stats()
        except SurestepError:
            return None

    async def _scheduler_status(self) -> SchedulerStatus | None:
        try:
            return await self._gateway.link.status()
        except SurestepError:
            return None


def _as_json(message: SchedulerStatus) -> dict[str, Any]:
    """Field names as in the .proto; 64-bit counts as numbers."""
    fields = MessageToDict(
        message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    converted: dict[str, Any] = _numbers(fields, message.DESCRIPTOR)
    return converted


def _numbers(fields: Any, descriptor: Any) -> Any:
    """JSON of protobuf writes 64-bit integers as strings, for JavaScript's sake."""
    for name, field in descriptor.fields_by_name.items():
        if name not in fields:
            continue
        if field.message_type is not None:
            values = fields[name] if field.is_repeated else [fields[name]]
            for value in values:
                _numbers(value, field.message_type)
        elif field.type == field.TYPE_UINT64:
            fields[name] = int(fields[name])
    return fields
