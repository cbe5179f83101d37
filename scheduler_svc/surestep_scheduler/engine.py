"""The loop around the policy: schedule -> send -> apply, epoch after epoch.

Everything runs on one event loop and the core never awaits, so that requests come and go between
any two steps without locks.
"""

from __future__ import annotations

import asyncio
import logging
import time
from array import array
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple

from surestep_common.errors import (
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    SurestepError,
    Unavailable,
)
from surestep_proto import engine_pb2, generate_pb2

from .commit import apply
from .config import SchedulerSettings
from .deadline import Recent, StepTimer
from .limits import Limits
from .messages import Outcome
from .plan import to_proto
from .policy import schedule
from .sequence import Output, Request
from .sequence import Sequence as TokenSequence
from .state import SchedulerState
from .supervisors import Supervisors
from .workers import WorkerGroup

logger = logging.getLogger(__name__)

_RECONNECT_S = 0.2  # between attempts to reach the workers
_IDLE_S = 5.0  # between looks at the clock when nothing happens
_RETRY_AFTER_S = 1.0

StateListener = Callable[[generate_pb2.EngineState], Awaitable[None]]


class OpenRequest:
    """A request and the outputs its reader has not taken yet; at most max_len tokens of them."""

    def __init__(self, seq: TokenSequence) -> None:
        self.seq = seq
        self.started = False  # the first chunk was sent
        self._outputs: asyncio.Queue[Output] = asyncio.Queue()

    def put(self, output: Output) -> None:
        """Hand over an output."""
        self._outputs.put_nowait(output)

    async def get(self) -> list[Output]:
        """All outputs since the last call, at least one."""
        outputs = [await self._outputs.get()]
        while not self._outputs.empty():
            outputs.append(self._outputs.get_nowait())
        return outputs


class _Sent(NamedTuple):
    num_tokens: int
    sent_at: float
    budget_s: float
    expected_us: float  # what it should cost the workers; 0 = not known, or prompts are in it
    follows: bool  # there was work before it, so that the workers should not have had to wait


class Engine:
    """Owns the scheduler state and the connection to the workers."""

    def __init__(
        self,
        settings: SchedulerSettings,
        on_state: StateListener,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings = settings
        self._on_state = on_state
        self._clock = clock
        self._wake = asyncio.Event()
        self._requests: dict[str, OpenRequest] = {}
        self._sent: deque[_Sent] = deque()
        self.supervisors = Supervisors(settings.supervisor_addresses)
        self.gaps_s = Recent()  # in which workers had work to do and did not do it
        self._has_work = False
        self.timer = StepTimer(
            floor_s=settings.step_deadline_floor_s,
            ceiling_s=settings.step_deadline_ceiling_s,
            warmup_s=settings.step_warmup_s,
            warmup_steps=settings.step_warmup_steps,
        )
        self.engine_state = generate_pb2.WAITING_FOR_WORKERS
        self.core: SchedulerState | None = None  # None until the workers' sizes are known
        self.infos: Sequence[engine_pb2.WorkerInfo] = ()
        self.last_step_at: float | None = None
        self.num_deadlines_exceeded = 0

    @property
    def limits(self) -> Limits:
        """Sizes in force. Raises Unavailable before the workers were reached."""
        if self.core is None:
            raise Unavailable("no worker is ready", retry_after=_RETRY_AFTER_S)
        return self.core.limits

    @property
    def last_step_age_s(self) -> float:
        """Seconds since the last applied result; 0 before the first."""
        return 0.0 if self.last_step_at is None else self._clock() - self.last_step_at

    # -- requests ------------------------------------------------------------------------------

    def submit(self, request: Request) -> OpenRequest:
        """Queue a request. Raises Unavailable, InvalidRequest, RequestTooLarge or QueueFull."""
        if self.core is None:
            raise Unavailable("no worker is ready", retry_after=_RETRY_AFTER_S)
        if self.engine_state == generate_pb2.DRAINING:
            raise Unavailable("the scheduler is shutting down", retry_after=_RETRY_AFTER_S)
        opened = OpenRequest(self.core.add(request, self._clock()))
        self._requests[request.id] = opened
        self._wake.set()
        return opened

    def close(self, opened: OpenRequest) -> None:
        """The reader is gone: abort the request unless it has ended."""
        request_id = opened.seq.request.id
        if self._requests.get(request_id) is opened:
            del self._requests[request_id]
            assert self.core is not None
            self.core.abort(opened.seq)
            self._wake.set()

    def _deliver(self, output: Output) -> None:
        request_id = output.seq.request.id
        self._requests[request_id].put(output)
        if output.finish is not None or output.error is not None:
            del self._requests[request_id]

    # -- epochs --------------------------------------------------------------------------------

    async def run(self) -> None:
        """Serve until cancelled."""
        try:
            while True:
                group = await self._reach_workers()
                try:
                    reason = await self._run_epoch(group)
                finally:
                    await group.close()
                await self._recover(reason)
        finally:
            await self.supervisors.close()

    async def drain(self) -> None:
        """Admit nothing more; what is open goes on."""
        await self._set_state(generate_pb2.DRAINING)

    async def _set_state(self, state: generate_pb2.EngineState) -> None:
        if self.engine_state not in (state, generate_pb2.DRAINING):
            logger.info("state %s", generate_pb2.EngineState.Name(state))
            self.engine_state = state
            await self._on_state(state)

    async def _reach_workers(self) -> WorkerGroup:
        """Ask for the ranks until all are ready."""
        said = ""
        while True:
            group = WorkerGroup(await self.addresses())
            try:
                self._accept(await group.infos(self._settings.worker_connect_timeout_s))
            except InvalidRequest:  # settings that can never work
                await group.close()
                raise
            except SurestepError as error:
                await group.close()
                if str(error) != said:
                    said = str(error)
                    logger.info("waiting for workers: %s", said)
                await asyncio.sleep(_RECONNECT_S)
            else:
                return group

    async def addresses(self) -> list[str]:
        """host:port of each rank, in rank order, as far as known."""
        if self._settings.worker_addresses:
            return self._settings.worker_addresses
        statuses = await self.supervisors.statuses(self._settings.worker_connect_timeout_s)
        return [status.rank_address for status in statuses]

    def _accept(self, infos: list[engine_pb2.WorkerInfo]) -> None:
        if not infos:
            raise Unavailable("no supervisor answers")
        limits = self._settings.limits(infos[0])
        core = self.core or SchedulerState(limits)
        if (limits.vocab_size, limits.block_size) != (
            core.limits.vocab_size,
            core.limits.block_size,
        ):
            raise Unavailable("the workers came back with another model")
        if limits.max_request_len < core.limits.max_request_len:
            raise Unavailable("the workers came back with less room")
        core.open_epoch(1 + max(core.epoch, *(info.last_epoch for info in infos)), limits)
        self.core, self.infos = core, infos

    async def _run_epoch(self, group: WorkerGroup) -> str:
        """Step until the epoch is lost; returns why."""
        assert self.core is not None
        self.timer.start_epoch()
        self._sent.clear()
        await self._set_state(generate_pb2.SERVING)
        logger.info("epoch %d on %d ranks", self.core.epoch, len(self.infos))
        try:
            async with asyncio.TaskGroup() as tasks:
                group.start(tasks, self._wake.set)
                await self._drive(self.core, group)
        except* SurestepError as lost:
            reason = "; ".join(str(error) for error in lost.exceptions)
        return reason

    async def _recover(self, reason: str) -> None:
        assert self.core is not None
        logger.error("epoch %d is lost: %s", self.core.epoch, reason)
        await self._set_state(generate_pb2.RECOVERING)
        for seq in self.core.fence():
            message = "the request ran in every one of several worker failures"
            self._deliver(Output(seq, array("I"), error=InternalError(message)))
        pids = [info.pid for info in self.infos]
        await self.supervisors.restart(reason, pids, self._settings.restart_timeout_s)

    # -- steps ---------------------------------------------------------------------------------

    async def _drive(self, core: SchedulerState, group: WorkerGroup) -> None:
        while True:
            await self._send_plans(core, group)
            await self._wait()
            for outcome in group.take():
                self._apply(core, outcome)

    async def _send_plans(self, core: SchedulerState, group: WorkerGroup) -> None:
        while len(core.in_flight) <= core.limits.pipeline_depth:
            now = self._clock()
            plan = schedule(core, now)
            if plan is None:
                self._has_work = bool(core.in_flight)
                return
            budget_s = self.timer.budget_s(plan.num_step_tokens)
            expected_us = 0.0 if plan.num_tokens.any() else core.speculation.expected_us
            sent = _Sent(plan.num_step_tokens, now, budget_s, expected_us, self._has_work)
            self._has_work = True
            self._sent.append(sent)
            await group.send(to_proto(plan, round(1000 * sent.budget_s)), sent.budget_s)

    async def _wait(self) -> None:
        """Until something happens. Raises DeadlineExceeded when the oldest step is late."""
        timeout_s = _IDLE_S
        if self._sent:
            timeout_s = max(
                self._started_at(self._sent[0]) + self._sent[0].budget_s - self._clock(), 0
            )
        try:
            async with asyncio.timeout(timeout_s):
                await self._wake.wait()
        except TimeoutError as error:
            if self._sent:
                self.num_deadlines_exceeded += 1
                raise DeadlineExceeded(
                    f"no result within {self._sent[0].budget_s:.1f} s"
                ) from error
        self._wake.clear()

    def _started_at(self, sent: _Sent) -> float:
        """Workers run one step at a time: a step starts when the one before it has ended."""
        return max(sent.sent_at, self.last_step_at or 0.0)

    def _apply(self, core: SchedulerState, outcome: Outcome) -> None:
        if outcome.epoch != core.epoch:
            return
        outputs = apply(core, outcome)
        sent, now = self._sent.popleft(), self._clock()
        took_s = now - self._started_at(sent)
        self.timer.observe(sent.num_tokens, took_s)
        if sent.expected_us:
            core.speculation.overhead.observe(sent.expected_us, 1e6 * took_s)
        self.last_step_at = now
        if sent.follows:
            self.gaps_s.add(outcome.gap_us * 1e-6)
        for output in outputs:
            self._deliver(output)
