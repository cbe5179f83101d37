"""The parent of one rank: spawns, monitors, kills and replaces it, and dumps its stacks.

It holds no tensors and imports no torch, so that nothing the rank does can keep it from answering.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import signal
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc
from surestep_common.errors import InvalidRequest, Unavailable
from surestep_proto import supervisor_pb2 as pb
from surestep_proto import supervisor_pb2_grpc as pb_grpc

from surestep_worker.checkpoint.held_weights import HeldWeights
from surestep_worker.checkpoint.weight_update import WeightUpdates
from surestep_worker.config import WorkerSettings
from surestep_worker.host import activity
from surestep_worker.host.oom import OomKills

from .adoption import Adopted
from .control import Failure, MessageKind
from .heartbeat_monitor import POLL_S, HeartbeatMonitor, Stall
from .rank_process import ExitHistory, ExitReason, RankProcess, StartFailure, heartbeat_proto
from .sleep import WEIGHTS_GO, WEIGHTS_STAY, Sleep
from .staging import receive
from .standbys import BACKOFF_S, Standbys, back_off_s

logger = logging.getLogger(__name__)

_START_AFRESH_AFTER = 3  # failures with what an earlier rank left, which is then given up
_PERMANENT_RETRY_S = 30.0  # between attempts after a permanent failure
_WATCH_S, _LONGEST_WATCH_S = 0.2, 1.0  # of a rank that is late
_FINAL_MESSAGES_S = 0.5  # for reading a rank's last messages after its exit


class Supervisor(pb_grpc.SupervisorServicer):
    """Keeps one rank and its standbys alive. `run` owns them; the RPCs only read and request."""

    def __init__(
        self,
        command: Sequence[str],
        settings: WorkerSettings,
        oom: OomKills | None = None,
        first: RankProcess | None = None,
    ) -> None:
        """`command` starts a standby; `first` is one that was started before."""
        self._settings = settings
        self._rank: RankProcess | None = None
        self._standbys = Standbys(command, settings, first)
        self._found: Adopted | None = None  # a rank that an earlier supervisor has left
        self._ready = asyncio.Event()
        self._exits = ExitHistory()
        self._oom = oom or OomKills()
        self._weights = HeldWeights(settings.model)
        self._updates = WeightUpdates(self._weights, settings.replacements)
        self._profile_result = b""  # measurements of a rank, which the next one need not repeat
        self._start_failure: StartFailure | None = None  # since the last rank that was ready
        self._sleep = Sleep(WEIGHTS_GO if settings.load_on_demand else 0)

    async def run(self) -> None:
        """Replace the rank whenever it ends. Cancel to stop, and then `close`.

        Raises Unavailable when this process has no descriptors left, which another one has.
        """
        while True:
            await self._sleep.through()
            try:
                self._rank = self._adopt() or await self._standbys.take()
                if not self._ready.is_set():
                    self._activate(self._rank)
            except OSError as error:
                if error.errno == errno.EMFILE:
                    raise Unavailable(f"no rank can be started: {error.strerror}") from error
                await self._cannot_spawn(error)
            else:
                await self._live(self._rank)
                await self._sleep.unless_asked(self._pause_s())

    async def close(self) -> None:
        """Terminate the rank and what stands by, when `run` has ended: who cancels that one does so
        again and again, and a rank that hangs is to be waited for, and killed.
        """
        ending = [self._standbys.terminate()]
        if self._rank is not None:
            ending.append(self._rank.terminate())
        await asyncio.gather(*ending)

    def find(self, rank: Adopted | None) -> None:
        """Have `run` begin with a rank that an earlier supervisor has left, which is awake."""
        self._found = rank
        if rank is not None:
            self._sleep.end()

    def _adopt(self) -> RankProcess | None:
        """Take over the rank that was found, with all that its supervisor held for it."""
        found, self._found = self._found, None
        if found is None:
            return None
        settings = self._settings
        said = found.introduction
        self._weights.take_over(found.weights, said.source, said.checkpoint)
        self._profile_result = said.profile_result
        limits = settings.heartbeat_timeout_s, settings.load_timeout_s
        rank = RankProcess.adopted(found, *limits)
        self._ready.set()
        logger.warning(
            "rank %d, pid %d, is adopted: its supervisor has ended", settings.rank, rank.pid
        )
        return rank

    def _activate(self, rank: RankProcess) -> None:
        settings = self._settings
        how = "from its standby" if rank.imported else "from scratch"
        logger.info("rank %d starts %s, pid %d", settings.rank, how, rank.pid)
        limits = settings.heartbeat_timeout_s, settings.load_timeout_s
        rank.activate(self._weights, self._profile_result, *limits)

    async def _cannot_spawn(self, error: OSError) -> None:
        """Wait and try again, since the machine has no process, file or memory left for a rank."""
        rank, self._rank = self._rank, None
        if rank is not None:
            await rank.terminate()
        self._start_failure = StartFailure(Failure.TRANSIENT, f"no process can be started: {error}")
        logger.error("rank %d: %s", self._settings.rank, self._start_failure.reason)
        await self._sleep.unless_asked(BACKOFF_S[-1])

    async def _live(self, rank: RankProcess) -> None:
        """Supervise a rank from activation to its exit."""
        settings = self._settings
        async with asyncio.TaskGroup() as tasks:
            listening = tasks.create_task(self._listen(rank))
            helpers = [
                listening,
                tasks.create_task(self._watch(rank)),
                tasks.create_task(self._keep_standby()),
            ]
            await rank.wait()
            await asyncio.wait([listening], timeout=_FINAL_MESSAGES_S)
            exit_reason = self._explained(await rank.wait())  # its last messages count
            for helper in helpers:
                helper.cancel()
        rank.close()
        was_ready = self._ready.is_set()
        if self._sleep.level:
            logger.info("rank %d, pid %d, is put to sleep", settings.rank, rank.pid)
        else:
            self._record(rank, exit_reason, was_ready=was_ready)
        rank.recorded.set()
        self._ready.clear()
        self._rank = None
        await self._clean_up()
        if not was_ready or exit_reason.cause == pb.OUT_OF_MEMORY:
            self._weights.renew_caches()  # which may be why, or take the memory

    def _record(self, rank: RankProcess, exit_reason: ExitReason, *, was_ready: bool) -> None:
        """Record the end of a rank, and why it never got ready if it did not."""
        failure = rank.start_failure
        if failure is not None:
            exit_reason = exit_reason._replace(reason=failure.reason)
        logger.error(
            "rank %d, pid %d, ended: %s", self._settings.rank, rank.pid, exit_reason.reason
        )
        self._exits.record(rank.pid, exit_reason, rank.heartbeat.read(), was_ready=was_ready)
        if not was_ready:
            self._start_failure = failure or StartFailure(Failure.TRANSIENT, exit_reason.reason)

    def _explained(self, exit_reason: ExitReason) -> ExitReason:
        """Recognise a kill by the kernel, whose signal looks like any other."""
        if exit_reason.signal == signal.SIGKILL and self._oom.explain():
            return ExitReason(
                pb.OUT_OF_MEMORY, "killed: the machine is out of memory", exit_reason.signal
            )
        return exit_reason

    def _pause_s(self) -> float:
        """Return the seconds to wait before starting the next rank."""
        # With weights in memory, nothing in the model folder is at fault.
        if self._failure is Failure.PERMANENT and not self._weights.sealed:
            logger.error("rank %d: next attempt in %.0f s", self._settings.rank, _PERMANENT_RETRY_S)
            return _PERMANENT_RETRY_S
        return back_off_s(self._exits.failures)

    @property
    def _failure(self) -> Failure:
        return self._start_failure.failure if self._start_failure else Failure.TRANSIENT

    async def _clean_up(self) -> None:
        """Discard what the next rank should not be given."""
        failure = self._failure
        distrusted = self._exits.failures >= _START_AFRESH_AFTER
        if distrusted:
            self._profile_result = b""
        suspected = distrusted and failure is Failure.TRANSIENT and self._weights.sealed
        useless = failure is Failure.WEIGHTS or (suspected and await self._can_load_afresh())
        self._weights.renew(all_of_it=useless)

    async def _can_load_afresh(self) -> bool:
        """Return whether the weights, which may be what ends the ranks, can be loaded again."""
        folder, checkpoint = self._weights.source.folder, self._weights.checkpoint
        if folder is None:
            return False
        try:
            found = await asyncio.to_thread(self._updates.loadable)
        # Whatever makes the ranks fail may keep this process from reading the files, too.
        except (InvalidRequest, OSError, RuntimeError, MemoryError) as error:
            logger.warning("the weights in memory are kept, since there are no others: %s", error)
            return False
        if found != (checkpoint or found):
            logger.warning("the weights in memory are kept: %s holds another model now", folder)
            return False
        return True

    async def _listen(self, rank: RankProcess) -> None:
        async for message in rank.messages():
            if message.kind is MessageKind.STANDBY:
                rank.imported = True
            elif message.kind is MessageKind.FAILED:
                rank.start_failure = StartFailure(message.failure, message.reason)
            elif message.kind is MessageKind.READY:
                self._profile_result = message.profile_result
                self._weights.ready(message.checkpoint)
                self._start_failure = None
                seconds = self._exits.record_ready()
                after = f", {seconds:.2f} s after the end of the last one" if seconds else ""
                logger.info("rank %d, pid %d, is ready%s", self._settings.rank, rank.pid, after)
                self._ready.set()
            elif message.kind is MessageKind.TERMINATING:
                rank.terminating = True

    async def _watch(self, rank: RankProcess) -> None:
        """End the rank when its heartbeat stalls, though it need not wait for a core or a disk."""
        while True:
            stall = await self._stalled(HeartbeatMonitor(rank.heartbeat, time.monotonic_ns()))
            if await self._activity(rank, _WATCH_S) != pb.WAITING:
                break
        logger.error("rank %d, pid %d, hangs: %s", self._settings.rank, rank.pid, stall)
        await rank.end(pb.HUNG, f"hung: {stall}")

    async def _stalled(self, monitor: HeartbeatMonitor) -> Stall:
        while (stall := monitor.check(time.monotonic_ns())) is None:
            self._oom.look(time.monotonic())
            await asyncio.sleep(POLL_S)
        return stall

    async def _activity(self, rank: RankProcess, seconds: float) -> pb.Activity:
        """Watch the rank for so long, unless it is known already what it does."""
        if rank.heartbeat.read().phase == pb.COMPILING:
            return pb.AWAITING_COMPILER
        if self._settings.device == "cpu":
            return await activity.observe(rank.pid, seconds)
        # A device's work is not to be seen from here.
        return pb.AT_REST if activity.is_stopped(rank.pid) else pb.ACTIVITY_UNKNOWN

    async def _keep_standby(self) -> None:
        if self._settings.standby:
            await self._ready.wait()
            await self._standbys.keep()

    async def Status(
        self, request: pb.SupervisorStatusRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.SupervisorStatus:
        """Return the state of the rank."""
        settings, rank = self._settings, self._rank
        status = pb.SupervisorStatus(
            pid=os.getpid(),
            address=settings.supervisor_address,
            rank=settings.rank,
            rank_state=pb.DEAD,
            rank_address=settings.rank_address,
            restarts=self._exits.count,
            last_exit=self._exits.last,
            exits=self._exits.reports(),
            standby_pid=self._standbys.pid,
            held_weight_bytes=self._weights.nbytes,
            sleep_level=self._sleep.level,
            weight_version=self._weights.source.version,
            weights_unsettled=self._weights.unsettled,
            num_failures=self._exits.failures,
        )
        if self._sleep.sound:
            status.rank_state = pb.ASLEEP
        if self._start_failure is not None:
            status.failure = self._start_failure.reason
            status.failure_is_permanent = self._start_failure.failure is Failure.PERMANENT
        if rank is not None:
            beat = rank.heartbeat.read()
            status.rank_pid = rank.pid
            status.rank_state = pb.READY if self._ready.is_set() else pb.STARTING
            status.heartbeat.CopyFrom(heartbeat_proto(beat, beat.age_s()))
            if request.watch_ms:
                seconds = min(request.watch_ms / 1000, _LONGEST_WATCH_S)
                status.activity = await self._activity(rank, seconds)
        return status

    async def Restart(
        self, request: pb.RestartRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.RestartResponse:
        """Dump stacks and kill the rank. The `run` loop replaces it; Status then has its exit."""
        rank = self._rank
        if rank is None or request.expected_pid not in (0, rank.pid):
            return pb.RestartResponse(restarted=False)
        logger.warning(
            "rank %d, pid %d, is restarted: %s", self._settings.rank, rank.pid, request.reason
        )
        await rank.end(pb.REQUESTED, f"restart: {request.reason}")
        await rank.recorded.wait()
        return pb.RestartResponse(restarted=True)

    async def Sleep(
        self, request: pb.SleepRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.SleepResponse:
        """End the rank and start no other. Raises InvalidRequest for a level that is not known."""
        if request.level not in (WEIGHTS_STAY, WEIGHTS_GO):
            raise InvalidRequest(f"there is no sleep of level {request.level}", param="level")
        deeper = request.level > self._sleep.level
        await self._sleep.begin(request.level, lambda: self._rank)
        if deeper and request.level == WEIGHTS_GO:
            self._weights.give_up()
        self._weights.renew_caches()  # what ranks have computed is memory of the machine's, too
        return pb.SleepResponse(held_weight_bytes=self._weights.nbytes)

    async def Wake(
        self, request: pb.WakeRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.WakeResponse:
        """Start a rank again, if none may be started, whatever became of those before."""
        if self._sleep.level:
            self._start_failure = None
        self._sleep.end()
        return pb.WakeResponse()

    async def StageWeights(
        self, request_iterator: AsyncIterator[pb.WeightPart], context: Any
    ) -> pb.StagedWeights:
        """Take in weights beside the rank. Raises InvalidRequest for those of another model."""
        return await receive(self._updates, request_iterator)

    async def UseWeights(
        self, request: pb.UseWeightsRequest, context: Any
    ) -> pb.UseWeightsResponse:
        """Have the next rank load what was staged. Raises InvalidRequest, and while a rank runs
        Unavailable.
        """
        if not self._sleep.sound:
            raise Unavailable("weights change while the rank sleeps")
        await asyncio.to_thread(self._updates.use, request.version)
        return pb.UseWeightsResponse()

    async def SettleWeights(
        self, request: pb.SettleWeightsRequest, context: Any
    ) -> pb.SettleWeightsResponse:
        """Give up the weights of before."""
        self._weights.settle()
        return pb.SettleWeightsResponse()

    async def RollBackWeights(
        self, request: pb.RollBackWeightsRequest, context: Any
    ) -> pb.RollBackWeightsResponse:
        """Have the next rank load the weights of before. Raises Unavailable without any."""
        level = self._sleep.level
        if self._weights.unsettled:
            await self._sleep.begin(level or WEIGHTS_STAY, lambda: self._rank)
        try:
            self._weights.roll_back()
        finally:
            if not level:
                self._sleep.end()
        return pb.RollBackWeightsResponse(version=self._weights.source.version)
