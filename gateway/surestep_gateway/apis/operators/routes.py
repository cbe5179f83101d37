"""Endpoints for operators: health, metrics, load, status."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, TypeVar

from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import Response
from surestep_common.errors import SurestepError, Unavailable
from surestep_common.releases import package_version

from surestep_gateway.apis.route import DescribedRoute, Description, Parameter
from surestep_gateway.context import Gateway, Models
from surestep_gateway.http.admission import Access, RuledRoute
from surestep_gateway.http.errors import JsonResponse
from surestep_gateway.observability.scheduler_metrics import SchedulerReading
from surestep_gateway.schedulers.scheduler_client import SchedulerClient
from surestep_gateway.settings.config import GatewaySettings

from .openapi import document
from .overview import OverviewSource
from .overview_model import GatewayView
from .pages import docs_page, home_page
from .status_page import PAGE, PAGE_FILES, StatusPage

T = TypeVar("T")

_DOCUMENTS = frozenset({"/openapi.json", "/docs"})
_STATUS_PAGE = frozenset({PAGE, PAGE_FILES, "/overview"})

_EVERY = "*"  # model
_MINUTE = {"answers", "client_gone", "failed", "failed_in_streams", "refused"}

_HOME = Description(
    summary="What this server is, for people.", media_type="text/html", errors=(401,)
)
_DOCS = Description(summary="This document, for people.", media_type="text/html", errors=(401,))
_PAGE = Description(summary="The status page.", media_type="text/html")
_LIVE = Description(summary="The process answers.", media_type="")
_HEALTH = Description(
    summary="A model is served, or was --resume-timeout-s ago.", media_type="", errors=(503,)
)
_READY = Description(
    summary="Requests sent now would be served.",
    parameters=(Parameter("model", {"type": "string"}),),
    media_type="",
    errors=(404, 503),
)
_VERSION = Description(summary="Version of the gateway.")
_METRICS = Description(summary="Prometheus metrics.", media_type="text/plain", errors=(401,))
_LOAD = Description(summary="Requests that are open.", errors=(401,))
_STATUS = Description(summary="Every process behind this gateway.", errors=(401,))
_OVERVIEW = Description(summary="What the status page shows.", errors=(401,))


class OperatorRoutes:
    def __init__(self, models: Models, address: str) -> None:
        self._models = models
        self._gateway = gateway = models.first  # for what all have in common
        self._address = address
        self._version = package_version()
        self._root = gateway.settings.root_path
        self._hidden = _hidden(gateway.settings)
        self._overview = OverviewSource(models, self._this_process)
        self._one_scrape = asyncio.Lock()  # at a time: numbers of an older one would look reset

    def routes(self) -> list[RuledRoute]:
        page = StatusPage()
        probes, everybody, figures, operators = (
            partial(DescribedRoute, "GET", access=access, counted=False)
            for access in (Access.PROBES, Access.EVERYBODY, Access.METRICS, Access.OPERATORS)
        )
        bare = partial(RuledRoute, counted=False)
        routes: list[RuledRoute] = [
            operators("/", self.home, _HOME),
            operators("/docs", self.docs, _DOCS),
            everybody(PAGE, page.page, _PAGE),
            bare(PAGE_FILES, page.file, methods=["GET"], access=Access.EVERYBODY),
            probes("/health", self.health, _HEALTH),
            probes("/health/live", self.live, _LIVE),
            probes("/health/ready", self.ready, _READY),
            bare("/ping", self.health, methods=["GET", "POST"], access=Access.PROBES),
            everybody("/version", self.version, _VERSION),
            bare("/openapi.json", self.openapi, methods=["GET"], access=Access.EVERYBODY),
            figures("/metrics", self.metrics, _METRICS),
            figures("/load", self.load, _LOAD),
            operators("/status", self.status, _STATUS),
            operators("/overview", self.overview, _OVERVIEW),
        ]
        return [route for route in routes if route.path not in self._hidden]

    async def live(self, request: Request) -> Response:
        """Liveness: this process responds."""
        return Response()

    async def health(self, request: Request) -> Response:
        """Health as vLLM has it: a model is served, with time for ranks that come back."""
        self._models.check_well()
        return Response()

    async def ready(self, request: Request) -> Response:
        """Readiness: a request sent now would be served, by any model, `?model=NAME` or all (*)."""
        if self._gateway.admission.leaving:
            raise Unavailable("the server is shutting down")
        name = request.query_params.get("model")
        asked = self._models.all if name in (None, _EVERY) else [self._models.named(name)]
        each = [one.pool.why_not(one.settings.first_token_timeout_s) for one in asked]
        reasons = [reason for reason in each if reason]
        if len(reasons) == len(each) or (reasons and name == _EVERY):
            raise Unavailable(reasons[0])
        return Response()

    async def version(self, request: Request) -> Response:
        return JsonResponse({"version": self._version})

    async def openapi(self, request: Request) -> Response:
        return JsonResponse(self._document(request))

    async def home(self, request: Request) -> Response:
        """Describe this server as an HTML page."""
        names = self._models.names
        return home_page(self._version, names, self._state(), self._root, self._hidden)

    async def docs(self, request: Request) -> Response:
        """Render the OpenAPI document as an HTML page."""
        return docs_page(self._document(request), self._root)

    def _document(self, request: Request) -> dict[str, Any]:
        """Describe every route of the application, those of other classes included."""
        return document(self._version, request.app.routes, self._root)

    async def metrics(self, request: Request) -> Response:
        """Return Prometheus text; the gateway's own part even when no scheduler responds."""
        async with self._one_scrape:
            now = time.monotonic()
            known = self._models.schedulers
            every_stats, every_status = await asyncio.gather(
                _ask(known, SchedulerClient.query_stats), _ask(known, SchedulerClient.query_status)
            )
            readings = [
                SchedulerReading(
                    one.name,
                    scheduler.number,
                    scheduler.address,
                    scheduler.breaker.state(now),
                    stats,
                    scheduler.info,
                    status,
                )
                for (one, scheduler), stats, status in zip(
                    known, every_stats, every_status, strict=True
                )
            ]
            text = self._gateway.metrics.render(readings)
        return Response(text, headers={"content-type": CONTENT_TYPE_LATEST})

    async def load(self, request: Request) -> Response:
        """Return the requests open here (vLLM's `server_load`) and the schedulers' total load."""
        load: dict[str, Any] = {"server_load": self._gateway.admission.num_open}
        answers = await _ask(self._models.schedulers, SchedulerClient.query_stats)
        known = [stats for stats in answers if stats is not None]
        if known:
            blocks = sum(stats.num_blocks_total for stats in known)
            load |= {
                "num_running": sum(stats.num_running for stats in known),
                "num_waiting": sum(stats.num_waiting for stats in known),
                "kv_cache_usage": sum(stats.num_blocks_used for stats in known) / max(1, blocks),
            }
        return JsonResponse(load)

    async def status(self, request: Request) -> Response:
        """Return every process behind this gateway, for `surestep status`."""
        now, known = time.monotonic(), self._models.schedulers
        schedulers = [
            {
                "url": scheduler.address,
                "model": model.name,
                "residence": model.pool.residence,
                "admits": scheduler.admits(now),
                "leaving": scheduler.leaving,
                "circuit_breaker": scheduler.breaker.state(now).name,
                "load": scheduler.load,
                "status": None if status is None else as_json(status),
            }
            for (model, scheduler), status in zip(
                known, await _ask(known, SchedulerClient.query_status), strict=True
            )
        ]
        return JsonResponse(
            {
                "gateway": self._this_process().model_dump(exclude={"models"}),
                "answers": self._gateway.metrics.clients.view(now).model_dump(include=_MINUTE),
                "schedulers": schedulers,
            }
        )

    async def overview(self, request: Request) -> Response:
        """Return processes and figures in one document, for the status page."""
        json = await self._overview.json()
        return Response(json, media_type="application/json", headers={"cache-control": "no-store"})

    def _this_process(self) -> GatewayView:
        return GatewayView(
            pid=os.getpid(),
            address=self._address,
            state=self._state(),
            version=self._version,
            models=self._models.names,
            open_requests=self._gateway.admission.num_open,
        )

    def _state(self) -> str:
        if self._gateway.admission.leaving:
            return "DRAINING"
        serving = any(one.pool.serving or one.pool.comes_and_goes for one in self._models.all)
        return "SERVING" if serving else "WAITING_FOR_SCHEDULER"


async def _ask(
    known: Sequence[tuple[Gateway, SchedulerClient]],
    question: Callable[[SchedulerClient], Awaitable[T]],
) -> list[T | None]:
    """Query every scheduler; None stands for one that does not respond."""

    async def ask(scheduler: SchedulerClient) -> T | None:
        try:
            return await question(scheduler)
        except SurestepError:
            return None

    return list(await asyncio.gather(*(ask(one) for _, one in known)))


def _hidden(settings: GatewaySettings) -> frozenset[str]:
    """Return the paths that the settings switch off."""
    documents = _DOCUMENTS if settings.disable_fastapi_docs else frozenset[str]()
    return documents if settings.ui else documents | _STATUS_PAGE


def as_json(message: Message) -> dict[str, Any]:
    """Convert a message to JSON with the field names of the .proto and 64-bit counts as numbers."""
    fields = MessageToDict(
        message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    converted: dict[str, Any] = _numbers(fields, message.DESCRIPTOR)
    return converted


def _numbers(fields: Any, descriptor: Any) -> Any:
    """Turn the strings that protobuf's JSON uses for 64-bit integers back into numbers, in
    place.
    """
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
