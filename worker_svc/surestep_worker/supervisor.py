"""The parent of one rank: spawns it, watches it, dumps its stacks, kills it, replaces it.

Holds no tensors and imports no torch, so that nothing the rank does can stop it from answering.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import time
from collections.abc import Sequence
from typing import Any

import grpc
from surestep_proto import engine_pb2 as pb
from surestep_proto import engine_pb2_grpc as pb_grpc

from .config import WorkerSettings
from .control import Kind
from .exits import Exits, report_beat
from .held_weights import HeldWeights
from .oom import OomKills
from .rank_process import RankProcess, Verdict
from .watch import POLL_S, Watch

logger = logging.getLogger(__name__)

_BACKOFF_S = (0.0, 0.5, 1.0, 2.0, 5.0)  # by consecutive failures
_STANDBY_DELAY_S = 2.0  # after a rank became ready: the cores are its own at first
_DISTRUST_AFTER = 3  # failures with what an earlier rank left; then everything is done afresh


class Supervisor(pb_grpc.SupervisorServicer):
    """Keeps one rank alive and one standby for it. `run` owns them; the RPCs only look and ask."""

    def __init__(
        self, command: Sequence[str], settings: WorkerSettings, oom: OomKills | None = None
    ) -> None:
        """`command` starts a standby."""
        self._command = command
        self._settings = settings
        self._rank: RankProcess | None = None
        self._standby: RankProcess | None = None
        self._ready = asyncio.Event()
        self._exits = Exits()
        self._oom = oom or OomKills()
        self._weights = HeldWeights()
        self._memo = b""  # what a rank has measured: the next one need not

    async def run(self) -> None:
        """Replace the rank whenever it ends. Cancel to stop; the rank is then terminated."""
        try:
            while True:
                self._rank = await self._next()
                await self._live(self._rank)
                await _back_off(self._exits.failures)
        finally:
            for process in (self._standby, self._rank):
                if process is not None:
                    await process.terminate()

    async def _next(self) -> RankProcess:
        standby, self._standby = self._standby, None
        if standby is not None and standby.alive:
            return standby
        return await RankProcess.spawn(self._command, self._settings)

    async def _live(self, rank: RankProcess) -> None:
        """From activation to the end of the process."""
        settings = self._settings
        how = "from its standby" if rank.imported else "from scratch"
        logger.info("rank %d starts %s, pid %d", settings.rank, how, rank.pid)
        limits = settings.heartbeat_timeout_s, settings.load_timeout_s
        rank.activate(self._weights.fd, self._memo, *limits)
        async with asyncio.TaskGroup() as tasks:
            helpers = [
                tasks.create_task(self._listen(rank)),
                tasks.create_task(self._watch(rank)),
                tasks.create_task(self._keep_standby()),
            ]
            verdict = self._explained(await rank.wait())
            for helper in helpers:
                helper.cancel()
        logger.error("rank %d, pid %d, ended: %s", settings.rank, rank.pid, verdict.reason)
        was_ready = self._ready.is_set()
        self._exits.note(rank.pid, verdict, rank.heartbeat.read(), was_ready=was_ready)
        rank.noted.set()
        self._ready.clear()
        self._rank = None
        self._clean_up()

    def _explained(self, verdict: Verdict) -> Verdict:
        """The kernel kills as others do, and says so elsewhere."""
        if verdict.signal == signal.SIGKILL and self._oom.explain():
            return Verdict(pb.OUT_OF_MEMORY, "killed: the machine is out of memory", verdict.signal)
        return verdict

    def _clean_up(self) -> None:
        """What the next rank may not be given."""
        distrusted = self._exits.failures >= _DISTRUST_AFTER
        if distrusted:
            self._memo = b""
        if distrusted or not self._weights.sealed:
            self._weights.renew()

    async def _listen(self, rank: RankProcess) -> None:
        async for message in rank.messages():
            if message.kind is Kind.STANDBY:
                rank.imported = True
            elif message.kind is Kind.READY:
                self._memo = message.memo
                seconds = self._exits.note_ready()
                after = f", {seconds:.2f} s after the end of the last one" if seconds else ""
                logger.info("rank %d, pid %d, is ready%s", self._settings.rank, rank.pid, after)
                self._ready.set()
            elif message.kind is Kind.LEAVING:
                rank.leaving = True

    async def _watch(self, rank: RankProcess) -> None:
        """End the rank when its heartbeat stands still."""
        watch = Watch(rank.heartbeat, time.monotonic_ns())
        while (late := watch.look(time.monotonic_ns())) is None:
            self._oom.look(time.monotonic())
            await asyncio.sleep(POLL_S)
        logger.error("rank %d, pid %d, hangs: %s", self._settings.rank, rank.pid, late)
        await rank.end(pb.HUNG, f"hung: {late}")

    async def _keep_standby(self) -> None:
        """Have a standby some time after the rank is ready."""
        if not self._settings.standby:
            return
        await self._ready.wait()
        await asyncio.sleep(_STANDBY_DELAY_S)
        for attempt in range(sys.maxsize):
            standby = self._standby = await RankProcess.spawn(self._command, self._settings)
            logger.info("rank %d has a standby, pid %d", self._settings.rank, standby.pid)
            async for _ in standby.messages():
                standby.imported = True
            verdict = await standby.wait()
            self._standby = None
            logger.warning("standby, pid %d, ended: %s", standby.pid, verdict.reason)
            await _back_off(attempt + 1)

    async def Status(
        self, request: pb.SupervisorStatusRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.SupervisorStatus:
        """What the supervisor knows of its rank."""
        settings, rank, standby = self._settings, self._rank, self._standby
        status = pb.SupervisorStatus(
            pid=os.getpid(),
            address=settings.supervisor_address,
            rank=settings.rank,
            rank_state=pb.DEAD,
            rank_address=settings.rank_address,
            restarts=self._exits.count,
            last_exit=self._exits.last,
            exits=self._exits.reports(),
            standby_pid=standby.pid if standby is not None and standby.imported else 0,
            held_weight_bytes=self._weights.nbytes,
        )
        if rank is not None:
            beat = rank.heartbeat.read()
            status.rank_pid = rank.pid
            status.rank_state = pb.READY if self._ready.is_set() else pb.STARTING
            status.heartbeat.CopyFrom(report_beat(beat, beat.age_s()))
        return status

    async def Restart(
        self, request: pb.RestartRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.RestartResponse:
        """Dump stacks, kill. The `run` loop replaces the rank; Status tells how it ended then."""
        rank = self._rank
        if rank is None or request.expected_pid not in (0, rank.pid):
            return pb.RestartResponse(restarted=False)
        logger.warning(
            "rank %d, pid %d, is restarted: %s", self._settings.rank, rank.pid, request.reason
        )
        await rank.end(pb.REQUESTED, f"restart: {request.reason}")
        await rank.noted.wait()
        return pb.RestartResponse(restarted=True)


async def _back_off(failures: int) -> None:
    await asyncio.sleep(_BACKOFF_S[min(failures, len(_BACKOFF_S) - 1)])


def rank_command() -> list[str]:
    """Command line of a standby."""
    return [sys.executable, "-m", "surestep_worker.rank"]
