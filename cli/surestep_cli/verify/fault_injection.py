"""A fault in mid-stream, and whether the server recovered from it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple

import aiohttp
from surestep_common.errors import SurestepError, Unavailable

from .answers import Answer, get, get_text
from .faults import FAULTS, WorkerRank, epoch_of, incidents_since, ranks_of, strike
from .report import FaultResult

_WHEN = 0.3  # of all tokens have come
_LOOK_S = 0.2
_REPLACED_S = 60.0
_STANDBY_S = 30.0  # for the process that waits to replace the next one


class LocalWorkers(NamedTuple):
    """The workers of a server that this command has started."""

    session: aiohttp.ClientSession
    ancestor: int  # process of the server

    async def status(self) -> Any:
        """Return the /status document. Raise Unavailable."""
        return await get(self.session, "status")

    async def serves(self) -> bool:
        """Return whether requests would be served."""
        with contextlib.suppress(Unavailable):
            await get_text(self.session, "health/ready")
            return True
        return False


class FaultInjection:
    """Watches streams and injects the fault in the middle of `expected` tokens in all."""

    def __init__(self, name: str, victims: LocalWorkers, expected: int) -> None:
        self._name = name
        self._victims = victims
        self._wanted = max(1, int(_WHEN * expected))
        self._heard = 0
        self._lefts: list[list[int]] = []  # tokens that each stream has had, and will have
        self._time = asyncio.Event()
        self._ended = False

    def listener(self, reference: Answer) -> Callable[[int], None]:
        """Return a callback for a stream whose answer is to equal the reference."""
        counts = [0, reference.num_tokens]
        self._lefts.append(counts)

        def heard(tokens: int) -> None:
            counts[0] += tokens
            self._heard += tokens
            if self._heard >= self._wanted:
                self._time.set()

        return heard

    def streams_ended(self) -> None:
        """Record that no stream is left to disturb."""
        self._ended = True
        self._time.set()

    async def wait_and_strike(self) -> FaultResult:
        """Inject the fault; return when the server has recovered, or cannot."""
        result = FaultResult(self._name)
        try:
            before = await self._victims.status()
            victim = self._victim(before)
            result.rank, result.pid = victim.rank, victim.pid
            await self._time.wait()
            result.num_open = sum(0 < had < all_of for had, all_of in self._lefts)
            if self._ended or not result.num_open:
                raise Unavailable("no stream was in the middle: answers are too short for that")
            strike(victim, FAULTS[self._name], self._victims.ancestor)
            await self._replaced(victim)
            await self._settled(before)
            after = await self._victims.status()
            result.incidents = incidents_since(after, epoch_of(before))
        except SurestepError as error:
            result.problem = str(error)
        return result

    def _victim(self, status: Any) -> WorkerRank:
        """Return the first worker, or the last one for the second fault."""
        ranks = ranks_of(status)
        if not ranks:
            raise Unavailable("the server names no worker that runs")
        return ranks[0] if self._name == "killed" else ranks[-1]

    async def _replaced(self, victim: WorkerRank) -> None:
        async def another() -> bool:
            with contextlib.suppress(Unavailable):
                for each in ranks_of(await self._victims.status()):
                    if each[:2] == victim[:2] and each.pid != victim.pid:
                        return await self._victims.serves()
            return False

        if not await _until(another, _REPLACED_S):
            raise Unavailable(f"the worker was not replaced within {_REPLACED_S:.0f} s")

    async def _settled(self, before: Any) -> None:
        """Wait for as many standby processes as before, so that the next fault is comparable."""
        wanted = _num_standbys(before)

        async def settled() -> bool:
            with contextlib.suppress(Unavailable):
                return _num_standbys(await self._victims.status()) >= wanted
            return False

        await _until(settled, _STANDBY_S)


def _num_standbys(status: Any) -> int:
    return sum(
        bool(supervisor["standby_pid"])
        for scheduler in status["schedulers"]
        if scheduler["status"] is not None
        for supervisor in scheduler["status"]["supervisors"]
    )


async def _until(condition: Callable[[], Any], patience_s: float) -> bool:
    """Poll until the condition holds; return False when that takes too long."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(patience_s):
            while not await condition():  # noqa: ASYNC110  # of another process
                await asyncio.sleep(_LOOK_S)
            return True
    return False
