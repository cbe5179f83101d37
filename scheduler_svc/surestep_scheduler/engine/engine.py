"""The loop around the policy: epoch after epoch, with whatever workers there are."""

from __future__ import annotations

import asyncio
import logging
import time
from array import array
from collections.abc import Awaitable, Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor

from surestep_common.errors import InvalidRequest, ModelChanged, SurestepError, Unavailable
from surestep_proto import scheduler_pb2, supervisor_pb2, worker_pb2

from surestep_scheduler.cache.log import CacheLog
from surestep_scheduler.config import SchedulerSettings
from surestep_scheduler.core.limits import Limits
from surestep_scheduler.core.poison import CANARY
from surestep_scheduler.core.sequence import Adapter, Finish, Output, Request
from surestep_scheduler.core.state import Replay, SchedulerState

from .adapters import Adapters
from .compilations import Compilations
from .epoch import Epoch, under_way
from .incidents import Cause, Incident, IncidentLog, diagnose
from .open_requests import OpenRequests, Outbox, RequestOutputs, Weights, named
from .pauses import RETRY_AFTER_S, Pauses, Slept
from .refit import refit
from .steps import StepMonitor, StepTimer
from .supervisors import Supervisors
from .wire import kept_by
from .workers import WorkerGroup, check_alike

logger = logging.getLogger(__name__)

_SHORTEST_POLL_S, _LONGEST_POLL_S = 0.01, 0.2
_POLL_SHARE = 0.02  # of the time that passed already
_QUESTION_TIMEOUT_S = 2.0  # of one to a worker or a supervisor
_RESTART_TIMEOUT_S = 20.0  # for a supervisor to end a rank
_ASLEEP_POLL_S = 1.0  # between two looks whether a new supervisor has started a rank
_HASHED_INLINE = 16_384  # tokens of a prompt whose blocks are hashed in less than a millisecond

StateListener = Callable[[scheduler_pb2.EngineState], Awaitable[None]]


class Engine:
    """Owns the scheduler state and the connection to the workers."""

    def __init__(
        self,
        settings: SchedulerSettings,
        on_state: StateListener,
        clock: Callable[[], float] = time.monotonic,
        log: CacheLog | None = None,
    ) -> None:
        """`log`: is told what the prefix cache has."""
        self._settings = settings
        self.log = log
        self._on_state = on_state
        self.clock = clock
        self._wake = asyncio.Event()
        self._requests = OpenRequests()
        self._epoch: Epoch | None = None  # the one under way
        self._group: WorkerGroup | None = None  # of it
        self._compilations = Compilations()
        self._hashing = ThreadPoolExecutor(1, thread_name_prefix="hashing")
        self.pauses = Pauses()
        self.adapters = Adapters(settings.adapters, settings.lora_folder)
        self.held_weight_bytes = 0  # on all ranks, of a sleeping engine
        self.next_version: str | None = None  # of weights that ranks are to come back with
        self.updating = False  # an update is under way, which may wait for requests first
        self._unsettled = False  # ranks can go back to the weights of before
        self.supervisors = Supervisors(settings.supervisor_addresses)
        self.incidents = IncidentLog()
        floor_s, ceiling_s = settings.step_deadline_floor_s, settings.step_deadline_ceiling_s
        timer = StepTimer(floor_s=floor_s, ceiling_s=ceiling_s, warmup_s=settings.step_warmup_s)
        self.monitor = StepMonitor(timer)
        self.engine_state = scheduler_pb2.WAITING_FOR_WORKERS
        self.state: SchedulerState | None = None  # None until the workers' sizes are known
        self.infos: Sequence[worker_pb2.WorkerInfo] = ()
        self.waiting_for = "no worker has answered yet"  # in a line; empty while it serves

    @property
    def limits(self) -> Limits:
        """Sizes in force. Raises Unavailable before the workers were reached."""
        return self._known_state().limits

    @property
    def model(self) -> worker_pb2.WorkerInfo:
        """Model that rank 0 serves. Raises Unavailable before the workers were reached."""
        self._known_state()
        return self.infos[0]

    @property
    def epoch(self) -> int:
        """Number of the newest epoch; 0 before the first."""
        return self.state.epoch if self.state else 0

    @property
    def model_fingerprint(self) -> str:
        """Fingerprint of the model that is served, or was before the workers were lost."""
        return self.infos[0].model_fingerprint if self.infos else ""

    def check_model(self, fingerprint: str) -> None:
        """Raise ModelChanged for a request that was begun with another model; empty = any."""
        if fingerprint and self.model_fingerprint not in ("", fingerprint):
            raise ModelChanged("the request was begun with another model than is served here")

    def _known_state(self) -> SchedulerState:
        if self.state is None:
            message = f"no worker is ready: {self.waiting_for}"
            raise Unavailable(message, retry_after=RETRY_AFTER_S)
        return self.state

    def age_s(self, at: float | None) -> float:
        """Return the seconds since a time on the engine's clock; 0 for None."""
        return 0.0 if at is None else self.clock() - at

    # -- requests ------------------------------------------------------------------------------

    async def submit(self, request: Request, outbox: Outbox) -> RequestOutputs:
        """Queue a request, whose outputs go to `outbox`.

        Raises Unavailable, InvalidRequest, RequestTooLarge, QueueFull, or ModelChanged when the
        model that it was checked for is not served any more.
        """
        state = self._known_state()
        seq, limits = state.sequence(request, self.clock()), state.limits
        if limits.enable_prefix_caching and len(seq.tokens) > _HASHED_INLINE:
            model = self.model_fingerprint
            loop = asyncio.get_running_loop()
            await loop.run_in_executor(self._hashing, seq.chain.extend, seq.tokens)
            self.check_model(model)
        await self.pauses.over()
        if state.limits is not limits:  # the workers were replaced meanwhile
            seq = state.sequence(request, self.clock())
        if self.engine_state == scheduler_pb2.DRAINING:
            raise shutting_down()
        self.adapters.check(request.adapter)
        opened = self._requests.open(state.enqueue(seq, self.clock()), outbox)
        self._wake.set()
        return opened

    async def compile(self, request: Request) -> None:
        """Compile a request's grammar before it waits for a slot, if there is room for it there.

        Raises as `submit` does, QueueFull or Unavailable if others keep the workers busy; a request
        that has delivered tokens already is compiled when it moves in, then.
        """
        state = self._known_state()
        state.check_room(state.sequence(request, self.clock()), self.clock())
        await self._compilations.compile(request, lambda: self._group)

    @property
    def group(self) -> WorkerGroup | None:
        """Return the ranks of the epoch under way, if there is one."""
        return self._group if self._epoch is not None else None

    def close(self, opened: RequestOutputs) -> None:
        """Abort a request whose reader is gone, unless it has ended."""
        if self._requests.close(opened):
            assert self.state is not None
            self.state.abort(opened.seq)
            self._wake.set()

    def abort(self, ids: Collection[str]) -> int:
        """End open requests with the tokens they have, all or those `named`; return how many."""
        if (state := self.state) is None:
            return 0
        ended = named(state.asked_for, ids)
        for seq in ended:
            state.abort(seq)
            self._requests.deliver([Output(seq, array("I"), finish=Finish.ABORTED)])
        self._wake.set()
        return len(ended)

    def hand_back(self) -> None:
        """End what is open so that the callers can submit it again, elsewhere."""
        if self.state is None:
            return
        for seq in list(self.state.open.values()):
            self.state.abort(seq)
            self._requests.fail(seq, shutting_down())

    # -- epochs --------------------------------------------------------------------------------

    async def run(self) -> None:
        """Serve until cancelled."""
        try:
            while True:
                await self._sleep_through()
                group = self._group = await self._reach_workers()
                if group is None:
                    continue
                try:
                    error = await self._run_epoch(group)
                finally:
                    self._epoch = self._group = None
                    await group.close()
                if isinstance(error, Slept):
                    self._fence(group.num_unread)
                else:
                    await self._recover(error, group.num_unread)
        finally:
            self._hashing.shutdown(wait=False, cancel_futures=True)
            await self.supervisors.close()

    async def drain(self) -> None:
        """Admit nothing more; what is open goes on, unless an operator has stopped it."""
        await self._set_engine_state(scheduler_pb2.DRAINING)
        self.pauses.close()
        if self.pauses.stopping:
            self.hand_back()

    def interrupt(self, error: SurestepError) -> bool:
        """End the epoch for this reason. Returns whether one was under way."""
        if self._epoch is None:
            return False
        self._epoch.interrupt(error)
        return True

    async def tell_state(self) -> None:
        """Tell whether an epoch under way is paused, and let it go on where it is not."""
        if self._epoch is None:
            return
        paused = self.pauses.info is not None
        self.waiting_for = self.pauses.words if paused else ""
        await self._set_engine_state(scheduler_pb2.PAUSED if paused else scheduler_pb2.SERVING)
        self._wake.set()

    async def _sleep_through(self) -> None:
        """Have no workers while operators want none, whatever becomes of their supervisors."""
        while self.pauses.stops_workers:
            level = self.pauses.level
            self.waiting_for = self.pauses.words
            try:
                self.held_weight_bytes = await self.supervisors.sleep(level, _RESTART_TIMEOUT_S)
            except SurestepError as error:
                logger.info("a rank is not asleep yet: %s", error)
            else:
                self.pauses.slept_level = level
                await self._set_engine_state(scheduler_pb2.SLEEPING)
            await self.pauses.change(_ASLEEP_POLL_S)

    async def _set_engine_state(self, state: scheduler_pb2.EngineState) -> None:
        if self.engine_state not in (state, scheduler_pb2.DRAINING):
            logger.info("state %s", scheduler_pb2.EngineState.Name(state))
            self.engine_state = state
            await self._on_state(state)

    async def _reach_workers(self) -> WorkerGroup | None:
        """Ask for the ranks until all are ready, at first often: it should not cost time itself.

        None: there shall be none.
        """
        began = self.clock()
        while not self.pauses.stops_workers:
            try:
                return await self._try_workers()
            except InvalidRequest:  # settings that can never work
                raise
            except SurestepError as error:
                if str(error) != self.waiting_for:
                    self.waiting_for = str(error)
                    logger.info("waiting for workers: %s", error)
            poll_s = _POLL_SHARE * (self.clock() - began)
            await self.pauses.change(min(max(poll_s, _SHORTEST_POLL_S), _LONGEST_POLL_S))
        return None

    async def _try_workers(self) -> WorkerGroup:
        """Connect to all ranks for a new epoch. Raises a SurestepError unless they are ready."""
        statuses = await self.supervisors.statuses(_QUESTION_TIMEOUT_S)
        await self._wake_up(max((status.sleep_level for status in statuses), default=0))
        ordered = self.next_version is not None
        self._unsettled = await self.supervisors.agree(statuses, ordered=ordered)
        self.supervisors.check_ready(statuses)
        group = WorkerGroup(self.addresses(statuses))
        try:
            infos = await group.infos(_QUESTION_TIMEOUT_S)
            check_alike(infos)
            lost = await self.adapters.settle(group, infos)
            self._accept(infos, lost)
        except BaseException:
            await group.close()
            raise
        self.pauses.announce()
        return group

    async def _wake_up(self, level: int) -> None:
        """Have ranks started that sleep although they need not.

        Raises Slept where a scheduler before this one was told to let them sleep.
        """
        if level and not self.pauses.known:
            self.pauses.adopt(level)
            raise Slept(self.pauses.words)
        if level:
            await self.supervisors.wake(_QUESTION_TIMEOUT_S)

    def addresses(self, statuses: Sequence[supervisor_pb2.SupervisorStatus]) -> list[str]:
        """Return host:port of each rank, in rank order, as far as known."""
        told = [status.rank_address for status in statuses]
        return self._settings.worker_addresses or told

    def _accept(
        self, infos: list[worker_pb2.WorkerInfo], lost_adapters: Collection[Adapter]
    ) -> None:
        """Go on with these workers, whatever they have become; what is open and does not fit ends.

        Raises InvalidRequest when the settings do not go with their sizes.
        """
        limits = self._settings.limits(infos[0])
        state = self.state or SchedulerState(limits, self.log)
        same_model = infos[0].model_fingerprint == self.model_fingerprint
        fits = same_model or infos[0].weight_version == self.next_version
        refused = refit(state, limits, same_model=fits, lost_adapters=lost_adapters)
        self.next_version = None
        if self.infos and not fits:
            logger.warning("the workers serve another model now: %s", infos[0].model_path)
        if refused:
            logger.warning("%d open requests cannot go on: %s", len(refused), refused[0].error)
        for seq, error in refused:
            self._requests.fail(seq, error)
        kept = None
        if same_model and limits.cache_sizes == state.limits.cache_sizes:
            kept = kept_by(infos, state.planner, state.epoch)
        epoch = 1 + max(state.epoch, *(info.last_epoch for info in infos))
        state.open_epoch(epoch, limits, kept)
        self.incidents.kept(state.num_kept)
        self.state, self.infos = state, infos
        self._requests.weights = Weights(infos[0].weight_version, infos[0].model_fingerprint)

    async def _run_epoch(self, group: WorkerGroup) -> SurestepError:
        """Step until the epoch is lost; returns why."""
        assert self.state is not None
        self._epoch = Epoch(
            self.state,
            self._requests,
            self.monitor,
            self.incidents,
            wake=self._wake,
            clock=self.clock,
            activity=self.supervisors.activity,
            paused=lambda: self.pauses.stopping,
        )
        await self.tell_state()
        if self._unsettled:
            await self.supervisors.settle_weights(_QUESTION_TIMEOUT_S)
        logger.info("epoch %d on %d ranks", self.state.epoch, len(self.infos))
        await group.recompile(seq.request for seq in self.state.open.values())
        return await self._epoch.run(group)

    def _fence(self, num_unread: int) -> Replay:
        """Forget the workers of the epoch, and `num_unread` results of theirs."""
        state = self.state
        assert state is not None
        state.counters.fenced_messages += num_unread
        replay = state.fence()
        self._requests.lost(self.clock())
        if CANARY in state.open:  # the next one shows more if it starts afresh
            self.close(self._requests[CANARY])
        return replay

    async def _recover(self, error: SurestepError, num_unread: int) -> None:
        """Fence the epoch, have all ranks replaced, and find out what happened.

        `num_unread` results are dropped with it. The ranks are one group: when one is lost, the
        processes of the others are replaced too.
        """
        state, now = self.state, self.clock()
        assert state is not None
        detect_s, windows = self.monitor.silent_s(now), under_way(state)
        replay = self._fence(num_unread)
        self.waiting_for = f"epoch {state.epoch} is lost: {error}"
        await self._set_engine_state(scheduler_pb2.RECOVERING)
        pids = [info.pid for info in self.infos]
        await self.supervisors.restart(str(error), pids, _RESTART_TIMEOUT_S)
        statuses = await self.supervisors.statuses(_QUESTION_TIMEOUT_S)
        supervised = bool(self._settings.supervisor_addresses)
        cause, reason, weight = diagnose(error, self.infos, statuses, supervised=supervised)
        logger.error(
            "epoch %d is lost: %s: %s; noticed after %.1f s", state.epoch, cause, reason, detect_s
        )
        self.incidents.lost(Incident(cause, reason, state.epoch, now, detect_s, replay))
        again = self.incidents.num_open > 1
        if again or not cause.spares_caches:
            state.forget_caches()
        if cause is Cause.DRAFTER:
            state.speculation.suspend(reason)
        state.poison.lost(windows, weight)
        if state.poison.candidates:
            logger.warning("may be to blame, and are tried: %s", ", ".join(state.poison.candidates))
            state.forget_caches()
        await asyncio.sleep(self.incidents.pause_s)


def shutting_down() -> Unavailable:
    """Return the error of requests that come too late, and of those that did not finish in time."""
    return Unavailable("the scheduler is shutting down", retry_after=RETRY_AFTER_S)
