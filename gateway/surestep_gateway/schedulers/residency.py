"""The choice of models that are awake: those that requests wait for, as far as there is room.

A model that comes and goes is put to sleep by its schedulers when it was idle for long, or idle
longest of all while another one is wanted. That waits for open requests wherever they came from, so
it ends none; and what comes meanwhile wakes it again. One that cannot be loaded is left alone for a
while, longer after each failure, and its requests are told why.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Sequence
from enum import Enum, auto
from typing import NamedTuple

from surestep_common.errors import ModelNotLoaded, SurestepError, Unavailable
from surestep_proto import scheduler_pb2 as pb

from .pool import SchedulerPool
from .scheduler_client import SchedulerClient

logger = logging.getLogger(__name__)

_LOOK_S = 0.5
_LOAD_S = 3600.0  # for a model to load; its ranks have limits of their own
_SLEEP_S = 600.0  # for open requests to end
_SERVE_S = 30.0  # until the health of a loaded model is known
_ATTEMPTS = 2  # of a rank to start
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 5.0, 300.0  # after a failure
_NOTHING_STAYS = 2  # level of sleep


class Order(Enum):
    LOAD = auto()
    UNLOAD = auto()


class Standing(NamedTuple):
    """State of a model at one moment; all times are on one clock."""

    awake: bool  # it has memory, or is about to
    moving: bool  # it is being loaded or put to sleep
    stays: bool  # it is never put to sleep
    wanted_since: float | None  # requests wait for it
    idle_since: float | None  # None: it has requests, or does not serve
    sleeps_after_s: float | None  # of idleness; None = only for others


def orders(models: Sequence[Standing], most: int | None, now: float) -> dict[int, Order]:
    """Return what to do, by index, so that at most so many models are awake."""
    given: dict[int, Order] = {}
    idle = sorted(
        (model.idle_since, index)
        for index, model in enumerate(models)
        if model.awake and not model.moving and not model.stays and model.idle_since is not None
    )
    for since, index in idle:
        limit_s = models[index].sleeps_after_s
        if limit_s is not None and now - since >= limit_s:
            given[index] = Order.UNLOAD
    room = len(models) if most is None else most - sum(model.awake for model in models)
    leaving = sum(model.awake and model.moving for model in models) + len(given)
    victims = [index for _, index in idle if index not in given]
    wanted = sorted(
        (model.wanted_since, index)
        for index, model in enumerate(models)
        if model.wanted_since is not None and not model.awake and not model.moving
    )
    for _, index in wanted:
        if room > 0:
            room -= 1
            given[index] = Order.LOAD
        elif leaving > 0:
            leaving -= 1
        elif victims:
            given[victims.pop(0)] = Order.UNLOAD
    return given


class Resident:
    """A model and what is being done with it."""

    def __init__(self, pool: SchedulerPool, sleeps_after_s: float | None, level: int) -> None:
        self.pool = pool
        self.moving = False
        self._sleeps_after_s = sleeps_after_s
        self._level = level
        self._failures = 0  # in a row
        self._wanted_since: float | None = None

    def standing(self, now: float) -> Standing:
        """Look at it."""
        pool = self.pool
        # A call may have arrived at a scheduler that was just told to sleep, and waits there.
        wanted = pool.busy and pool.asleep and now >= pool.retry_at
        self._wanted_since = (self._wanted_since or now) if wanted else None
        idle = pool.serving and not pool.busy
        if not idle:
            pool.used_at = now
        return Standing(
            awake=not pool.asleep or pool.loading,
            moving=self.moving,
            stays=not pool.comes_and_goes,
            wanted_since=self._wanted_since,
            idle_since=pool.used_at if idle else None,
            sleeps_after_s=self._sleeps_after_s,
        )

    async def load(self) -> None:
        """Wake it. What goes wrong is told to the requests that wait."""
        pool, began = self.pool, time.monotonic()
        pool.begin_loading()
        try:
            async with asyncio.TaskGroup() as tasks:
                for scheduler in pool.schedulers:
                    if scheduler.asleep:
                        tasks.create_task(_wake(scheduler))
            for scheduler in pool.schedulers:
                if not scheduler.leaving:
                    await pool.until_admits(scheduler, _SERVE_S)
        except* SurestepError as errors:
            await self._give_up(_first(errors))
        else:
            self._failures = 0
            logger.info("%s is awake after %.1f s", pool.name, time.monotonic() - began)
        finally:
            pool.end_loading()

    async def _give_up(self, error: SurestepError) -> None:
        pause_s = min(_FIRST_PAUSE_S * 2.0 ** min(self._failures, 10), _LONGEST_PAUSE_S)
        self._failures += 1
        logger.error(
            "%s cannot be loaded, and is left alone for %.0f s: %s",
            self.pool.name,
            pause_s,
            error.message,
        )
        fault = ModelNotLoaded(f"{self.pool.name} cannot be loaded: {error.message}")
        self.pool.fail(fault, pause_s)
        await self._sleep(_NOTHING_STAYS)

    async def unload(self) -> None:
        """Put it to sleep when it has no request."""
        logger.info("%s is idle and is put to sleep", self.pool.name)
        await self._sleep(self._level)

    async def _sleep(self, level: int) -> None:
        order = pb.PauseRequest(level=level, mode=pb.PAUSE_WAIT)

        async def put(scheduler: SchedulerClient) -> None:
            await scheduler.pause(order, _SLEEP_S)
            await scheduler.look()

        try:
            await asyncio.gather(*(put(one) for one in self.pool.schedulers))
        except SurestepError as error:
            logger.warning("%s is not put to sleep: %s", self.pool.name, error.message)


class Residency:
    """Keeps at most so many models awake. `run` must be running."""

    def __init__(self, residents: Sequence[Resident], most: int | None) -> None:
        self._residents = residents
        self._most = most
        self._news = asyncio.Event()
        for one in residents:
            one.pool.on_want = self._news.set

    async def run(self) -> None:
        """Give orders until cancelled; return at once where no model comes and goes."""
        if not any(one.pool.comes_and_goes for one in self._residents):
            return
        async with asyncio.TaskGroup() as tasks:
            while True:
                for one, order in self._orders():
                    one.moving = True
                    tasks.create_task(self._carry_out(one, order))
                self._news.clear()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_LOOK_S):
                        await self._news.wait()

    def _orders(self) -> list[tuple[Resident, Order]]:
        now = time.monotonic()
        standings = [one.standing(now) for one in self._residents]
        given = orders(standings, self._most, now)
        full = not (Order.UNLOAD in given.values() or any(one.moving for one in standings))
        for index, one in enumerate(self._residents):
            one.pool.no_room = full and bool(standings[index].wanted_since) and index not in given
        return [(self._residents[index], order) for index, order in given.items()]

    async def _carry_out(self, one: Resident, order: Order) -> None:
        try:
            await (one.load() if order is Order.LOAD else one.unload())
        finally:
            one.moving = False
            self._news.set()


def _first(errors: BaseExceptionGroup[SurestepError]) -> SurestepError:
    """Return the first error of groups within groups."""
    first = errors.exceptions[0]
    return _first(first) if isinstance(first, BaseExceptionGroup) else first


async def _wake(scheduler: SchedulerClient) -> None:
    """Wake the workers of a scheduler. Raise Unavailable when they cannot start."""
    before = await _failures(scheduler)
    async with asyncio.TaskGroup() as tasks:
        resuming = tasks.create_task(scheduler.resume((), _LOAD_S))
        while not (await asyncio.wait([resuming], timeout=_LOOK_S))[0]:
            await _check_start(scheduler, before)
    scheduler.recheck()  # its earlier health does not count
    await scheduler.look()


async def _failures(scheduler: SchedulerClient) -> int:
    with contextlib.suppress(SurestepError):
        status = await scheduler.query_status()
        return max((one.num_failures for one in status.supervisors), default=0)
    return 0


async def _check_start(scheduler: SchedulerClient, before: int) -> None:
    try:
        status = await scheduler.query_status()
    except SurestepError:
        return  # it may be back in a moment; the order has a limit of its own
    for one in status.supervisors:
        hopeless = one.failure_is_permanent or one.num_failures >= before + _ATTEMPTS
        if one.failure and hopeless:
            raise Unavailable(f"rank {one.rank} cannot start: {one.failure}")
