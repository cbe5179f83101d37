"""The schedulers behind this gateway: replicas of one model, each with its own workers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Sequence

from surestep_common.errors import ModelChanged, Unavailable
from surestep_proto.scheduler_pb2 import SchedulerInfo

from .losses import IsolationQueue
from .routing import RoutingCandidate, choose
from .scheduler_client import RETRY_AFTER_S, SchedulerClient


class SchedulerPool:
    """Chooses the scheduler for each request. `run` must be running."""

    def __init__(self, addresses: Sequence[str]) -> None:
        """`addresses` are host:port, one per scheduler. Needs a running event loop."""
        self._changed = asyncio.Event()
        self.isolation = IsolationQueue()
        self.schedulers = tuple(SchedulerClient(address, self._notify) for address in addresses)

    async def run(self) -> None:
        """Follow the schedulers' health until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for scheduler in self.schedulers:
                tasks.create_task(scheduler.run())

    async def close(self) -> None:
        """Close the channels, which cancels open calls."""
        for scheduler in self.schedulers:
            await scheduler.close()

    @property
    def serving(self) -> bool:
        """Return whether any scheduler would accept a request now."""
        now = time.monotonic()
        return any(scheduler.admits(now) for scheduler in self.schedulers)

    @property
    def info(self) -> SchedulerInfo:
        """Facts of the served model. Raise Unavailable before they are known."""
        known = [scheduler for scheduler in self.schedulers if scheduler.info is not None]
        for scheduler in sorted(known, key=lambda one: not one.serving):
            assert scheduler.info is not None
            return scheduler.info
        raise Unavailable(f"the model is not ready yet{self.trouble}", retry_after=RETRY_AFTER_S)

    @property
    def trouble(self) -> str:
        """Why schedulers do not serve, to append to a message; empty when nothing is known."""
        known = dict.fromkeys(
            scheduler.trouble for scheduler in self.schedulers if scheduler.trouble
        )
        return f": {'; '.join(known)}" if known else ""

    def pick(
        self, key: bytes, avoid: Collection[SchedulerClient] = (), model: str = ""
    ) -> SchedulerClient | None:
        """Return the scheduler for a prefix (see `prefix_key`), None if none accepts requests.

        With the fingerprint of a `model`, only schedulers that may serve it are considered.
        """
        now = time.monotonic()
        schedulers = [
            scheduler
            for scheduler in self.schedulers
            if scheduler not in avoid and scheduler.admits(now)
        ]
        schedulers = [scheduler for scheduler in schedulers if scheduler.may_have(model)]
        if not schedulers:
            return None
        return schedulers[
            choose(
                key,
                [RoutingCandidate(scheduler.address, scheduler.load) for scheduler in schedulers],
            )
        ]

    async def acquire(self, key: bytes, timeout_s: float, model: str = "") -> SchedulerClient:
        """Wait until `pick` has a scheduler and return it.

        Raise Unavailable after `timeout_s`, which begin anew when a scheduler has drained: its
        successor comes then. Raise ModelChanged when every scheduler serves another model.
        """
        began = time.monotonic()
        while (scheduler := self.pick(key, model=model)) is None:
            if not any(scheduler.may_have(model) for scheduler in self.schedulers):
                raise ModelChanged("the request was begun with another model than is served now")
            drained_at = max(scheduler.drained_at for scheduler in self.schedulers)
            await self._wait_for_change(max(began, drained_at) + timeout_s)
        return scheduler

    async def until_admits(self, scheduler: SchedulerClient, timeout_s: float) -> None:
        """Wait until this scheduler accepts requests. Raise Unavailable after `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while not scheduler.admits(time.monotonic()):
            await self._wait_for_change(deadline)

    async def _wait_for_change(self, deadline: float) -> None:
        now = time.monotonic()
        if now >= deadline:
            raise Unavailable(f"no scheduler serves{self.trouble}", retry_after=RETRY_AFTER_S)
        waits = [
            wait
            for scheduler in self.schedulers
            if (wait := scheduler.breaker.waits_s(now)) is not None
        ]
        changed = self._changed
        try:
            async with asyncio.timeout(min([deadline - now, *waits])):
                await changed.wait()
        except TimeoutError:
            return

    def _notify(self) -> None:
        """Wake all tasks that wait now; later ones wait for the next change."""
        self._changed.set()
        self._changed = asyncio.Event()
