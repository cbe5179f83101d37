"""The Worker service of one rank: the event loop moves messages, the step thread moves tensors."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
import uuid
from collections import deque
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, Protocol, TypeVar

import grpc
from surestep_common import rpc
from surestep_common.errors import InvalidRequest, Unavailable
from surestep_common.releases import refuse_unknown
from surestep_common.request_params import check_grammar
from surestep_proto import sampling_pb2
from surestep_proto import worker_pb2 as pb
from surestep_proto import worker_pb2_grpc as pb_grpc

from surestep_worker.adapters.pool import AdapterPool
from surestep_worker.step.heartbeat import Heartbeat
from surestep_worker.step.result import Pending
from surestep_worker.tiers.moves import Moves

T = TypeVar("T")

logger = logging.getLogger(__name__)

_IDLE_NS = 500_000_000  # without a step
MAX_PLANS_IN_FLIGHT = 8  # per stream; more than any pipelining depth


class StepRunner(Protocol):
    """The runner as the service sees it. Its methods are called from the step thread only."""

    @property
    def num_late_compilations(self) -> int:
        """Number of kernels compiled while serving."""

    moves: Moves | None  # orders to the tiers behind its blocks; None: there are none

    def open(self, epoch: int) -> None:
        """Begin an epoch with empty slots."""

    def launch(self, plan: pb.StepPlan) -> Pending:
        """Start executing one plan."""

    @property
    def captured(self) -> tuple[int, int]:
        """Number of captured shapes of step, and of steps that had none (0 where nothing is
        captured)."""

    def capture_next(self) -> None:
        """Capture the next shape of step while there is nothing else to do, if any is left."""

    def compile(self, grammar: sampling_pb2.Grammar) -> Future[Any]:
        """Compile a grammar ahead of the request that brings it, unless that is cancelled. May be
        called from any thread."""

    @property
    def adapters(self) -> AdapterPool:
        """The pool of adapters, for any thread. Raises InvalidRequest without one."""

    def check_peers(self) -> None:
        """Raise Unavailable if a rank of the group is gone."""


class StepThread:
    """The only thread that touches tensors. Work runs in submission order."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="step")

    def submit(self, work: Callable[[], T]) -> asyncio.Future[T]:
        """Run `work` on the thread; the future belongs to the running loop.

        An exception is for the task that waits for it. A stream that is gone waits no longer, and
        what it left behind the newest epoch's fence is no error.
        """
        future = asyncio.get_running_loop().run_in_executor(self._pool, work)
        future.add_done_callback(lambda done: done.cancelled() or done.exception())
        return future

    def close(self) -> None:
        """Finish the running work and start nothing more."""
        self._pool.shutdown(wait=False, cancel_futures=True)


class WorkerService(pb_grpc.WorkerServicer):
    """Serves Info once the model is loaded and one Run stream per epoch."""

    def __init__(
        self, rank: int, world_size: int, thread: StepThread, heartbeat: Heartbeat
    ) -> None:
        self._thread = thread
        self.heartbeat = heartbeat
        self._runner: StepRunner | None = None
        self._facts = pb.WorkerInfo(
            rank=rank, world_size=world_size, pid=os.getpid(), instance_id=uuid.uuid4().hex
        )
        self._epoch = 0  # newest epoch accepted: the fence
        self._failed_epoch = 0  # of the latest step that failed
        self._last_step = 0
        self._last_step_at: float | None = None
        self._step_ended = 0  # by perf_counter_ns
        self._last_active = 0  # when the rank became ready or finished a step
        self._streams = 0
        self._loading = ThreadPoolExecutor(1, thread_name_prefix="adapters")
        self._in_flight: deque[pb.StepPlan] = deque()  # launched and not finished; step thread only

    def ready(self, runner: StepRunner, facts: pb.WorkerInfo) -> None:
        """Serve with this runner from now on; `facts` are merged into what Info reports."""
        self._facts.MergeFrom(facts)
        self._last_active = time.perf_counter_ns()
        self._runner = runner

    async def Info(
        self, request: pb.WorkerInfoRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.WorkerInfo:
        """Return the facts of this rank. Raises Unavailable while the model loads."""
        runner = self._loaded()
        captured, missed = runner.captured
        info = pb.WorkerInfo(
            last_epoch=self._epoch,
            last_step=self._last_step,
            late_compilations=runner.num_late_compilations,
            captured_shapes=captured,
            uncaptured_steps=missed,
        )
        info.MergeFrom(self._facts)
        if info.max_loras:
            info.adapters.extend(runner.adapters.held())
        if self._epoch:
            info.ClearField("kept")  # plans have written since
        if self._last_step_at is not None:
            info.last_step_age_s = time.monotonic() - self._last_step_at
        return info

    async def Compile(
        self, request: pb.CompileRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.CompileResponse:
        """Compile a grammar beside the steps, as long as the caller waits.

        Raises InvalidRequest for one that is wrong or too costly, Unavailable if there is no time.
        """
        refuse_unknown(request)
        check_grammar(request.grammar)
        await asyncio.wrap_future(self._loaded().compile(request.grammar))
        return pb.CompileResponse()

    async def LoadAdapter(
        self, request: pb.Adapter, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.Adapter:
        """Load an adapter beside the steps. Raises InvalidRequest for one that does not fit."""
        refuse_unknown(request)
        return await self._beside(partial(self._loaded().adapters.load, request))

    async def UnloadAdapter(
        self, request: pb.Adapter, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.UnloadAdapterResponse:
        """Forget an adapter."""
        await self._beside(partial(self._loaded().adapters.unload, request.place))
        return pb.UnloadAdapterResponse()

    async def _beside(self, work: Callable[[], T]) -> T:
        """Change the pool of adapters beside the steps, one after the other, although the caller of
        an earlier change may not wait any more."""
        return await asyncio.get_running_loop().run_in_executor(self._loading, work)

    async def Run(
        self,
        request_iterator: AsyncIterator[pb.StepPlan],
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> None:
        """Execute plans in order and write one result each, until the stream or the epoch ends."""
        runner = self._loaded()
        results: asyncio.Queue[asyncio.Future[_Step] | None] = asyncio.Queue(MAX_PLANS_IN_FLIGHT)
        self._streams += 1
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._read(runner, request_iterator, results))
                tasks.create_task(self._write(runner, results, context))
        except* Exception as group:  # noqa: BLE001  # the first one is raised again
            # The first failure is the cause; the others follow from the cancelled stream.
            error = group.exceptions[0]
            if self._streams == 1:  # else the newest epoch may not be this stream's
                code, message = rpc.status_of(error)
                self._facts.stream_error.CopyFrom(
                    pb.StreamError(epoch=self._epoch, code=code.name, message=message)
                )
            raise error from None
        finally:
            self._streams -= 1

    async def _read(
        self,
        runner: StepRunner,
        plans: AsyncIterator[pb.StepPlan],
        results: asyncio.Queue[asyncio.Future[_Step] | None],
    ) -> None:
        epoch: int | None = None
        async for plan in plans:
            received = time.perf_counter_ns()
            refuse_unknown(plan)
            if epoch is None:
                epoch = plan.epoch
                await self._open(runner, epoch)
            step = _Step(self, runner, plan, epoch, received)
            await results.put(self._thread.submit(step))
        await results.put(None)

    async def _open(self, runner: StepRunner, epoch: int) -> None:
        if epoch <= self._epoch:
            raise InvalidRequest(f"epoch {epoch} is not newer than {self._epoch}", param="epoch")
        self._epoch = epoch  # from here on, steps of older streams refuse to run
        self._last_step = 0
        await self._thread.submit(lambda: self._begin(runner, epoch))
        logger.info("epoch %d opened", epoch)

    def _begin(self, runner: StepRunner, epoch: int) -> None:
        self._in_flight.clear()  # what an older stream left
        runner.open(epoch)

    async def _write(
        self,
        runner: StepRunner,
        results: asyncio.Queue[asyncio.Future[_Step] | None],
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> None:
        while (future := await results.get()) is not None:
            step = await future
            if step.result is None:
                await asyncio.to_thread(step.wait)
                await self._thread.submit(step.finish)
            result = step.result
            assert result is not None, "finished"
            self._last_step, self._last_step_at = result.step, time.monotonic()
            await context.write(result)

    async def Move(
        self,
        request_iterator: AsyncIterator[pb.TierOrder],
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> None:
        """Execute orders to the tiers beside the steps, and answer each in its time."""
        moves = self._loaded().moves
        if moves is None:
            raise InvalidRequest("there are no tiers behind the KV blocks", param="action")
        writing = asyncio.Lock()

        async def answer(order: pb.TierOrder, answered: Future[pb.TierAnswer]) -> None:
            future = asyncio.wrap_future(answered)
            await asyncio.wait([future], timeout=order.timeout_ms / 1000)
            if not future.done():
                moves.give_up(order.number)
            told = await future
            async with writing:
                await context.write(told)

        try:
            async with asyncio.TaskGroup() as tasks:
                async for order in request_iterator:
                    refuse_unknown(order)
                    tasks.create_task(answer(order, moves.submit(order)))
        except* Exception as group:  # noqa: BLE001  # the first one is raised again
            raise group.exceptions[0] from None

    async def close(self, timeout_s: float) -> None:
        """Let tiers finish with what they were told to store, for as long as there is time."""
        if self._runner is not None and self._runner.moves is not None:
            await asyncio.to_thread(self._runner.moves.close, timeout_s)

    def step_began(self, plan: pb.StepPlan) -> None:
        """Record a launched plan. Called from the step thread."""
        self._in_flight.append(plan)
        self._update_heartbeat(plan)

    def step_ended(self, plan: pb.StepPlan) -> None:
        """Record a finished or failed plan; the time limit of the next one starts now."""
        with contextlib.suppress(ValueError):  # of an older stream
            self._in_flight.remove(plan)
        self._update_heartbeat(self._in_flight[0] if self._in_flight else None)

    def tick(self) -> None:
        """Show that an idle rank is alive. Called from the step thread.

        A rank that has been idle for a while captures shapes of step. Raises Unavailable if another
        rank of the group is gone: without an epoch nothing else would notice.
        """
        if not self._in_flight or not self._streams:
            if time.perf_counter_ns() - self._last_active > _IDLE_NS:
                self._loaded().capture_next()
            self.heartbeat.idle()
        if not self._streams:
            self._loaded().check_peers()

    def _update_heartbeat(self, plan: pb.StepPlan | None) -> None:
        if plan is None:
            self.heartbeat.idle()
        else:
            self.heartbeat.begin(plan.epoch, plan.step, plan.budget_ms)

    def gap_ns(self, started: int) -> int:
        """Return the nanoseconds from the end of the previous step to `started`, the start of this
        one.

        0 for the first step, and for one that was launched before the previous one had ended, as on
        a GPU. Called from the step thread, at the end of a step.
        """
        ended, self._step_ended = self._step_ended, time.perf_counter_ns()
        self._last_active = self._step_ended
        return max(0, started - ended) if ended else 0

    def check_fence(self, epoch: int) -> None:
        """Raise Unavailable if a newer stream has taken over, or a step of this one has failed.

        What is queued behind a failed step must not run: the other ranks are still in that step,
        and collectives of different steps would meet.
        """
        if epoch != self._epoch:
            raise Unavailable(f"epoch {epoch} is fenced by epoch {self._epoch}")
        if epoch == self._failed_epoch:
            raise Unavailable(f"an earlier step of epoch {epoch} has failed")

    def step_failed(self, epoch: int) -> None:
        """Let no further step of an epoch run. Called from the step thread."""
        self._failed_epoch = epoch

    def _loaded(self) -> StepRunner:
        if self._runner is None:
            raise Unavailable("the model is still loading")
        return self._runner


class _Step:
    """Plan on its way through the step thread."""

    def __init__(
        self,
        service: WorkerService,
        runner: StepRunner,
        plan: pb.StepPlan,
        epoch: int,
        received: int,
    ) -> None:
        self._service, self._runner, self._plan = service, runner, plan
        self._epoch, self._received = epoch, received
        self._started = 0
        self._pending: Pending
        self.result: pb.StepResult | None = None

    def __call__(self) -> _Step:
        """Launch the plan; finish it if it is done at once. On the step thread, like `finish`."""
        self._service.check_fence(self._epoch)
        self._started = time.perf_counter_ns()
        self._service.step_began(self._plan)
        try:
            self._pending = self._runner.launch(self._plan)
        except BaseException:
            self._service.step_failed(self._epoch)
            self._service.step_ended(self._plan)
            raise
        if self._pending.done:
            self.finish()
        return self

    def wait(self) -> None:
        """Wait until the device has finished the step. May be called on any thread."""
        self._pending.wait()

    def finish(self) -> None:
        """Read the outcome from the device into `result`."""
        self._service.check_fence(self._epoch)
        try:
            result = self._pending.finish()
        except BaseException:
            self._service.step_failed(self._epoch)
            raise
        finally:
            self._service.step_ended(self._plan)
        result.timings.queue_us = (self._started - self._received) // 1000
        result.timings.gap_us = self._service.gap_ns(self._started) // 1000
        self.result = result
