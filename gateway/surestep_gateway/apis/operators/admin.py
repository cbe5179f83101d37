"""Endpoints for administrators. They exist only where an admin key is configured."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Annotated, Any, NamedTuple, TypeVar

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response
from surestep_common.errors import NotFound, SurestepError, Unauthenticated, Unavailable

from surestep_gateway.apis.requests import body_of
from surestep_gateway.apis.route import DescribedRoute, Description
from surestep_gateway.context import Gateway, Models
from surestep_gateway.http.admission import Access, RuledRoute
from surestep_gateway.http.errors import JsonResponse, error_body
from surestep_gateway.request.parse import parse
from surestep_gateway.request.protocol import Body
from surestep_gateway.schedulers.scheduler_client import RETRY_AFTER_S, SchedulerClient

logger = logging.getLogger(__name__)

B = TypeVar("B", bound=Body)
Act = Callable[[SchedulerClient], Awaitable[dict[str, Any]]]


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


class Administrators:
    """Owners of the admin key, and the schedulers that they operate."""

    def __init__(self, models: Models) -> None:
        self._keys = models.first.settings.admin_keys()
        self._models = models

    @property
    def exist(self) -> bool:
        """Return whether there is an admin key."""
        return bool(self._keys)

    def check(self, request: Request) -> None:
        """Raise Unauthenticated for a request without the admin key."""
        if self._keys.client(request.headers.get("authorization", "").encode()) is None:
            raise Unauthenticated("missing or wrong admin key")

    def schedulers(self, request: Request) -> list[SchedulerClient]:
        """Return those that `?scheduler=host:port` and `?model=NAME` name, or all. Raise
        NotFound."""
        address = request.query_params.get("scheduler")
        chosen = [
            scheduler
            for model in self._asked(request)
            for scheduler in model.pool.schedulers
            if address in (None, scheduler.address)
        ]
        if not chosen and address is None:
            raise Unavailable("no scheduler is known yet", retry_after=RETRY_AFTER_S)
        if not chosen:
            raise NotFound(f"no scheduler at '{address}'", param="scheduler")
        return chosen

    def of_one_model(self, request: Request) -> list[SchedulerClient]:
        """Return the schedulers of the model that is asked for, or of the only one. Raise NotFound,
        MissingParameter."""
        self.model(request)
        return self.schedulers(request)

    def model(self, request: Request) -> Gateway:
        """Return the model that is asked for, or the only one. Raise NotFound, MissingParameter."""
        name = request.query_params.get("model")
        return self._models.unnamed() if name is None else self._models.named(name)

    def _asked(self, request: Request) -> Sequence[Gateway]:
        name = request.query_params.get("model")
        return self._models.all if name is None else [self._models.named(name)]

    async def until_admits(self, scheduler: SchedulerClient, timeout_s: float) -> None:
        """Wait until a scheduler accepts requests. Raise Unavailable after `timeout_s`."""
        pools = [one.pool for one, known in self._models.schedulers if known is scheduler]
        for pool in pools or [self._models.first.pool]:  # which says that it has left
            await pool.until_admits(scheduler, timeout_s)

    async def body(self, request: Request, kind: type[B]) -> B:
        """Return the body, an empty object where there is none. Raise SurestepError."""
        self.check(request)
        body = body_of(request)
        await body.read()
        return parse(kind, bytes(body.data) or b"{}")

    async def at_each(self, request: Request, act: Act) -> Round:
        """Act at every scheduler at once. Raise SurestepError if there is one, and it fails."""
        self.check(request)
        began = time.monotonic()

        async def at(scheduler: SchedulerClient) -> dict[str, Any] | SurestepError:
            try:
                told = await act(scheduler)
            except SurestepError as error:
                return error
            seconds = round(time.monotonic() - began, 3)
            return {"scheduler": scheduler.address} | told | {"seconds": seconds}

        chosen = self.schedulers(request)
        outcomes = await asyncio.gather(*map(at, chosen))
        failures = [one for one in outcomes if isinstance(one, SurestepError)]
        if failures and len(chosen) == 1:
            raise failures[0]
        told = [
            {"scheduler": scheduler.address} if isinstance(one, SurestepError) else one
            for scheduler, one in zip(chosen, outcomes, strict=True)
        ]
        return Round(told, failures)


class Round(NamedTuple):
    """Outcome of an order to several schedulers."""

    told: list[dict[str, Any]]  # by each
    failures: list[SurestepError]  # of those that failed

    def response(self, shown: dict[str, Any]) -> JsonResponse:
        """Return the answer; 503 with the first failure unless all did it."""
        if not self.failures:
            return JsonResponse(shown)
        return JsonResponse(shown | error_body(self.failures[0]), 503)


class AdminRoutes:
    """Handlers of one gateway; mounted only if there is an admin key."""

    def __init__(self, models: Models) -> None:
        self._administrators = Administrators(models)
        self._restarting = asyncio.Lock()

    def routes(self) -> Iterator[RuledRoute]:
        if self._administrators.exist:
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
        body = await self._administrators.body(request, RestartBody)
        reason = body.reason or "asked for by an operator"
        schedulers = self._administrators.schedulers(request)
        done: list[dict[str, Any]] = []
        async with self._restarting:
            for scheduler in schedulers:
                try:
                    done.append(await _restart(self._administrators, scheduler, reason))
                except SurestepError as error:
                    logger.error(
                        "restart of the workers of %s: %s", scheduler.address, error.message
                    )
                    failure = error_body(error)
                    return JsonResponse(
                        failure | {"restarted": done, "failed": scheduler.address}, 503
                    )
        return JsonResponse({"restarted": done})


async def _restart(
    administrators: Administrators, scheduler: SchedulerClient, reason: str
) -> dict[str, Any]:
    """Restart the ranks of one scheduler and wait until it serves again. Raise SurestepError."""
    began = time.monotonic()
    logger.warning("restarting the workers of %s: %s", scheduler.address, reason)
    answer = await scheduler.restart_workers(reason, _RESTART_S)
    scheduler.recheck()  # its earlier health does not count
    await administrators.until_admits(scheduler, _SERVE_S)
    return {
        "scheduler": scheduler.address,
        "epoch": answer.epoch,
        "num_ranks": answer.num_ranks,
        "seconds": round(time.monotonic() - began, 3),
    }
