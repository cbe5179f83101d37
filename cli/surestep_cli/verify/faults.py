"""Faults in mid-stream, limited to processes that this command has started, and the recovery."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
from surestep_common.errors import SurestepError, Unavailable

from surestep_cli.api.metrics import Metrics
from surestep_cli.api.sessions import get_json, get_text

from .answers import Answer
from .report import FaultResult, ReportedIncident

_FIRST = 1  # the process that is everybody's ancestor
_WHEN = 0.3  # of all tokens have come
_LEAST_OPEN = 2  # streams in the middle
_LOOK_S = 0.2
_REPLACED_S = 90.0
_STANDBY_S = 30.0  # for the process that waits to replace the next one


class Fault(NamedTuple):
    """A signal to a part of the server. A stopped process does not end: it hangs."""

    part: str  # rank, scheduler, supervisor
    number: signal.Signals


FAULTS: Mapping[str, Fault] = {
    "killed": Fault("rank", signal.SIGKILL),
    "stopped": Fault("rank", signal.SIGSTOP),
    "scheduler": Fault("scheduler", signal.SIGKILL),
    "supervisor": Fault("supervisor", signal.SIGKILL),
}
COMPANIES = {
    "killed": "worker killed",
    "stopped": "worker stopped",
    "scheduler": "scheduler killed",
    "supervisor": "supervisor killed",
}


class Process(NamedTuple):
    """A process of the server; `rank` is 0 for a scheduler."""

    scheduler: str
    rank: int
    pid: int


def processes_of(status: Mapping[str, Any], part: str) -> list[Process]:
    """Return the running processes of a kind in the /status document."""
    found = []
    for scheduler in status["schedulers"]:
        if (known := scheduler["status"]) is None:
            continue
        if part == "scheduler":
            found.append(Process(scheduler["url"], 0, known["pid"]))
            continue
        pid = "rank_pid" if part == "rank" else "pid"
        found += [
            Process(scheduler["url"], each["rank"], each[pid])
            for each in known["supervisors"]
            if each[pid] and each["rank_state"] == "READY"
        ]
    return found


def epoch_of(status: Mapping[str, Any]) -> int:
    """Return the highest epoch; 0 where none is reported."""
    known = [each["status"]["epoch"] for each in status["schedulers"] if each["status"]]
    return max(map(int, known), default=0)


def incidents_since(status: Mapping[str, Any], epoch: int) -> list[ReportedIncident]:
    """Return the incidents that ended this epoch or a later one, the newest first."""
    return [
        ReportedIncident(**{name: incident[name] for name in ReportedIncident._fields})
        for scheduler in status["schedulers"]
        if scheduler["status"] is not None
        for incident in scheduler["status"]["incidents"]
        if int(incident["epoch"]) >= epoch
    ]


def strike(victim: Process, number: signal.Signals, ancestor: int) -> None:
    """Send the signal. Raise Unavailable if the process is not below `ancestor`, or is gone."""
    if not descends(victim.pid, ancestor):
        raise Unavailable(f"process {victim.pid} is none that this command has started")
    try:
        os.kill(victim.pid, number)
    except ProcessLookupError:
        raise Unavailable(f"process {victim.pid} had ended by itself") from None


def descends(pid: int, ancestor: int) -> bool:
    """Return whether a process is a descendant of another one (Linux)."""
    while pid > _FIRST and pid != ancestor:
        pid = _parent(pid)
    return pid == ancestor


def _parent(pid: int) -> int:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0
    return int(stat.rpartition(")")[2].split()[1])


class LocalServer(NamedTuple):
    """A server that this command has started."""

    session: aiohttp.ClientSession
    ancestor: int  # process of the server

    async def status(self) -> Any:
        """Return the /status document. Raise Unavailable."""
        return await get_json(self.session, "status")

    async def num_resumed(self) -> int:
        """Return how many requests the gateway has submitted again. Raise Unavailable."""
        metrics = Metrics(await get_text(self.session, "metrics"))
        return int(metrics.total("surestep:resumed_requests_total"))

    async def serves(self) -> bool:
        """Return whether requests would be served."""
        with contextlib.suppress(Unavailable):
            await get_text(self.session, "health/ready")
            return True
        return False


class FaultInjection:
    """Watches streams and injects the fault in the middle of `expected` tokens in all."""

    def __init__(self, name: str, server: LocalServer, expected: int) -> None:
        self._name = name
        self._server = server
        self._wanted = max(1, int(_WHEN * expected))
        self._heard = 0
        self._lefts: list[list[int]] = []  # tokens that each stream has had, and will have
        self._time = asyncio.Event()
        self._over = asyncio.Event()

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
        self._over.set()
        self._time.set()

    async def wait_and_strike(self) -> FaultResult:
        """Inject the fault; return when the server has recovered, or cannot."""
        result = FaultResult(self._name)
        fault = FAULTS[self._name]
        try:
            before, resumed = await self._server.status(), await self._server.num_resumed()
            victim = self._victim(before, fault.part)
            result.rank, result.pid = victim.rank, victim.pid
            await self._time.wait()
            result.num_open = sum(0 < had < all_of for had, all_of in self._lefts)
            if self._over.is_set() or result.num_open < _LEAST_OPEN:
                raise Unavailable("no stream was in the middle: answers are too short for that")
            strike(victim, fault.number, self._server.ancestor)
            await self._replaced(victim, fault.part)
            await self._settled(before)
            await self._over.wait()  # by then every request has gone on
            if fault.part != "scheduler":  # a new one knows nothing of the time before it
                result.incidents = incidents_since(await self._server.status(), epoch_of(before))
            result.num_went_on = sum(each.num_replayed_requests for each in result.incidents)
            result.num_went_on += await self._server.num_resumed() - resumed
            if fault.part == "supervisor" and not result.incidents:
                result.num_went_on = result.num_open  # the next one has adopted its rank
            if not result.num_went_on:
                raise Unavailable("the server reports no request that had to go on")
        except SurestepError as error:
            result.problem = str(error)
        return result

    def _victim(self, status: Any, part: str) -> Process:
        """Return the first process, or the last one when it is to be stopped."""
        found = processes_of(status, part)
        if not found:
            raise Unavailable(f"the server names no {part} that runs")
        return found[-1] if self._name == "stopped" else found[0]

    async def _replaced(self, victim: Process, part: str) -> None:
        async def another() -> bool:
            with contextlib.suppress(Unavailable):
                for each in processes_of(await self._server.status(), part):
                    if each[:2] == victim[:2] and each.pid != victim.pid:
                        return await self._server.serves()
            return False

        if not await _until(another, _REPLACED_S):
            raise Unavailable(f"the {part} was not replaced within {_REPLACED_S:.0f} s")

    async def _settled(self, before: Any) -> None:
        """Wait for as many standby processes as before, so that the next fault is comparable."""
        wanted = sum(_standbys(before))

        async def settled() -> bool:
            with contextlib.suppress(Unavailable):
                return sum(_standbys(await self._server.status())) >= wanted
            return False

        await _until(settled, _STANDBY_S)


def _standbys(status: Any) -> Iterator[bool]:
    for scheduler in status["schedulers"]:
        if scheduler["status"] is not None:
            for supervisor in scheduler["status"]["supervisors"]:
                yield bool(supervisor["standby_pid"])


async def _until(condition: Callable[[], Any], patience_s: float) -> bool:
    """Poll until the condition holds; return False when that takes too long."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(patience_s):
            while not await condition():  # noqa: ASYNC110  # of another process
                await asyncio.sleep(_LOOK_S)
            return True
    return False
