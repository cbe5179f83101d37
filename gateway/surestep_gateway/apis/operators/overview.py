"""The document behind the status page, made at most once a second for any number of readers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from surestep_common.errors import SurestepError
from surestep_proto.scheduler_pb2 import SchedulerStatus

from surestep_gateway.context import Gateway, Models
from surestep_gateway.schedulers.scheduler_client import SchedulerClient

from .overview_engine import EngineView
from .overview_model import FiguresView, GatewayView, ModelView, Overview, SchedulerView

_FRESH_S = 0.9  # less than the time between two looks of one page
_STEPS = 512


class OverviewSource:
    """Builds the document. `gateway` describes this process."""

    def __init__(self, models: Models, gateway: Callable[[], GatewayView]) -> None:
        self._models = models
        self._clients = models.first.metrics.clients
        self._gateway = gateway
        self._one_at_a_time = asyncio.Lock()
        self._json = b""  # none yet
        self._made_at = 0.0

    async def json(self) -> bytes:
        """Return the document, a new one when the last is stale; concurrent callers share it."""
        async with self._one_at_a_time:
            if not self._json or time.monotonic() - self._made_at >= _FRESH_S:
                schedulers = await asyncio.gather(
                    *(_scheduler(model, one) for model, one in self._models.schedulers)
                )
                overview = Overview(
                    gateway=self._gateway(),
                    clients=self._clients.view(time.monotonic()),
                    schedulers=schedulers,
                )
                self._json = overview.model_dump_json().encode()
                self._made_at = time.monotonic()
            return self._json


async def _scheduler(model: Gateway, scheduler: SchedulerClient) -> SchedulerView:
    status = await _status(scheduler)
    now = time.monotonic()
    return SchedulerView(
        address=scheduler.address,
        serves=model.name,
        residence=model.pool.residence,
        comes_and_goes=model.pool.comes_and_goes,
        admits=scheduler.admits(now),
        circuit_breaker=scheduler.breaker.state(now).name,
        trouble=scheduler.trouble,
        model=None if scheduler.info is None else ModelView.of(scheduler.info),
        engine=None if status is None else EngineView.of(status),
        figures=FiguresView.of(scheduler.stats),
        history=scheduler.history.view(now),
        outages=scheduler.history.outages(now),
    )


async def _status(scheduler: SchedulerClient) -> SchedulerStatus | None:
    """Return the scheduler's status; None without a reply, and at once for a silent one."""
    if scheduler.silent:
        return None
    try:
        return await scheduler.query_status(_STEPS)
    except SurestepError:
        return None
