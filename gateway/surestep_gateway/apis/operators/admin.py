"""Endpoints for administrators. They exist only where an admin key is configured."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator
from typing import Annotated, Any

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response
from surestep_common.errors import NotFound, SurestepError, Unauthenticated

from surestep_gateway.apis.requests import body_of
from surestep_gateway.apis.route import DescribedRoute, Description
from surestep_gateway.context import Gateway
from surestep_gateway.http.admission import Access, RuledRoute
from surestep_gateway.http.errors import JsonResponse, error_body
from surestep_gateway.request.parse import parse
from surestep_gateway.request.protocol import Body
from surestep_gateway.schedulers.pool import SchedulerPool
from surestep_gateway.schedulers.scheduler_client import SchedulerClient

logger = logging.getLogger(__name__)


class RestartBody(Body):
    """POST /admin/workers/restart"""

    reason: Annotated[str, Field(max_length=500)] | None = None  # for the log


_RESTART = Description(
    summary="Replace the workers, one scheduler after the other.",
    bodies=(RestartBody,),
    body_required=False,
    errors=(400, 401, 404, 408, 413, 415, 503),
)
_RESTART_S = 30.0  # for the old ranks to be gone
_SERVE_S = 600.0  # for the new ones to have loaded


class AdminRoutes:
    """Handlers of one gateway; mounted only if there is an admin key."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._keys = gateway.settings.admin_keys()
        self._restarting = asyncio.Lock()

    def routes(self) -> Iterator[RuledRoute]:
        if self._keys:
            yield DescribedRoute(
                "POST",
                "/admin/workers/restart",
                self.restart_workers,
                _RESTART,
                access=Access.ADMINISTRATORS,
                counted=False,
            )

    async def restart_workers(self, request: Request) -> Response:
        """Replace every rank, one scheduler after the other, while open requests continue.

        `?scheduler=host:port` restarts the ranks of that scheduler alone. The response comes when
        all serve again. The first failure ends the round, so that a bad deployment takes down one
        replica and no more.
        """
        self._check_key(request)
        body = body_of(request)
        await body.read()
        reason = parse(RestartBody, bytes(body.data) or b"{}").reason or "asked for by an operator"
        schedulers = self._chosen(request.query_params.get("scheduler"))
        done: list[dict[str, Any]] = []
        async with self._restarting:
            for scheduler in schedulers:
                try:
                    done.append(await _restart(self._gateway.pool, scheduler, reason))
                except SurestepError as error:
                    logger.error(
                        "restart of the workers of %s: %s", scheduler.address, error.message
                    )
                    failure = error_body(error)
                    return JsonResponse(
                        failure | {"restarted": done, "failed": scheduler.address}, 503
                    )
        return JsonResponse({"restarted": done})

    def _check_key(self, request: Request) -> None:
        if self._keys.client(request.headers.get("authorization", "").encode()) is None:
            raise Unauthenticated("missing or wrong admin key")

    def _chosen(self, address: str | None) -> list[SchedulerClient]:
        schedulers = self._gateway.pool.schedulers
        chosen = [scheduler for scheduler in schedulers if address in (None, scheduler.address)]
        if not chosen:
            raise NotFound(f"no scheduler at '{address}'", param="scheduler")
        return chosen


async def _restart(pool: SchedulerPool, scheduler: SchedulerClient, reason: str) -> dict[str, Any]:
    """Restart the ranks of one scheduler and wait until it serves again. Raise SurestepError."""
    began = time.monotonic()
    logger.warning("restarting the workers of %s: %s", scheduler.address, reason)
    answer = await scheduler.restart_workers(reason, _RESTART_S)
    scheduler.recheck()  # its earlier health does not count
    await pool.until_admits(scheduler, _SERVE_S)
    return {
        "scheduler": scheduler.address,
        "epoch": answer.epoch,
        "num_ranks": answer.num_ranks,
        "seconds": round(time.monotonic() - began, 3),
    }
