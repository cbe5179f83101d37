"""A real gRPC Worker service around FakeEngine, for tests of everything in front of a worker."""

from __future__ import annotations

import asyncio
import os
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from itertools import count
from typing import Any

import grpc
from support.fakes.engine import FakeEngine
from support.fakes.model import Drafter, FakeModel, StatusOf
from surestep_common.errors import InvalidRequest
from surestep_common.rpc import Server, status_of
from surestep_proto import supervisor_pb2 as pb
from surestep_proto import worker_pb2
from surestep_proto.supervisor_pb2_grpc import SupervisorServicer, add_SupervisorServicer_to_server
from surestep_proto.worker_pb2_grpc import WorkerServicer, add_WorkerServicer_to_server

_PIDS = count(1 << 22)  # of no real process

BeforeStep = Callable[[worker_pb2.StepPlan], Awaitable[None]]


Perturb = Callable[[worker_pb2.StepPlan], int]


async def _at_once(plan: worker_pb2.StepPlan) -> None:
    """A step takes no time."""


def _exact(plan: worker_pb2.StepPlan) -> int:
    """All ranks agree."""
    return 0


class FakeWorker(WorkerServicer):
    """One rank. `before_step` may delay, hang or raise; `perturb` is added to a step's digest."""

    def __init__(
        self,
        model: FakeModel,
        *,
        rank: int = 0,
        world_size: int = 1,
        before_step: BeforeStep = _at_once,
        drafter: Drafter | None = None,
        status_of: StatusOf | None = None,
        perturb: Perturb = _exact,
    ) -> None:
        self.model = model
        self.engine = FakeEngine(model, drafter=drafter, status_of=status_of, rank=rank)
        self.num_streams = 0
        self.pid = next(_PIDS)
        self._world_size = world_size
        self._before_step = before_step
        self._perturb = perturb
        self._instance_id = uuid.uuid4().hex
        self._server: Server | None = None
        self._ended: worker_pb2.StreamError | None = None

    async def start(self, address: str = "127.0.0.1:0") -> str:
        """Listen; returns host:port."""
        self._server = Server([worker_pb2.DESCRIPTOR.services_by_name["Worker"]])
        add_WorkerServicer_to_server(  # generated
            self, self._server.grpc
        )
        port = await self._server.start(address)
        await self._server.set_serving(True)
        return f"127.0.0.1:{port}"

    async def stop(self) -> None:
        """Die at once: open streams are cut."""
        assert self._server is not None
        await self._server.stop(grace_s=0)

    async def Info(
        self, request: worker_pb2.WorkerInfoRequest, context: Any
    ) -> worker_pb2.WorkerInfo:
        """Facts of the fake model."""
        model = self.model
        return worker_pb2.WorkerInfo(
            rank=self.engine.rank,
            world_size=self._world_size,
            pid=self.pid,
            instance_id=self._instance_id,
            model_path="fake",
            architecture="FakeForCausalLM",
            dtype="float32",
            device="cpu",
            vocab_size=model.vocab_size,
            max_model_len=model.max_model_len,
            num_slots=model.num_slots,
            num_blocks=model.num_blocks,
            block_size=model.block_size,
            kv_windows=model.kv_windows,
            max_step_tokens=model.max_step_tokens,
            drafter="fake" if model.max_draft_tokens else "",
            max_draft_tokens=model.max_draft_tokens,
            drafter_has_state=model.drafter_has_state,
            drafter_looks_up=model.drafter_looks_up,
            recurrent=model.recurrent,
            num_snapshots=model.num_snapshots,
            prompt_chunk=model.prompt_chunk,
            last_epoch=self.engine.epoch,
            last_step=self.engine.step,
            eos_token_ids=model.eos_token_ids,
            defaults=model.defaults,
            model_fingerprint=model.fingerprint,
            hidden_size=2,
            headless=model.headless,
            stream_error=self._ended,
        )

    async def Compile(
        self, request: worker_pb2.CompileRequest, context: Any
    ) -> worker_pb2.CompileResponse:
        """Refuse every grammar."""
        raise InvalidRequest("the fake model keeps to no grammar", param="grammar")

    async def Run(
        self, requests: AsyncIterator[worker_pb2.StepPlan], context: Any
    ) -> AsyncIterator[worker_pb2.StepResult]:
        """Execute plans until a newer stream takes over."""
        try:
            async for result in self._run(requests, context):
                yield result
        except Exception as error:
            code, message = status_of(error)
            self._ended = worker_pb2.StreamError(
                epoch=self.engine.epoch, code=code.name, message=message
            )
            raise

    async def _run(
        self, requests: AsyncIterator[worker_pb2.StepPlan], context: Any
    ) -> AsyncIterator[worker_pb2.StepResult]:
        self.num_streams += 1
        stream = self.num_streams
        first = True
        async for plan in requests:
            if first and plan.epoch <= self.engine.epoch:
                await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "stale epoch")
            if first:
                self.engine.reset(plan.epoch)
                first = False
            await self._before_step(plan)
            if stream != self.num_streams:
                return
            result = self.engine.execute(plan)
            result.digest = (result.digest + self._perturb(plan)) % (1 << 64)
            yield result


@asynccontextmanager
async def serving(worker: FakeWorker, address: str = "127.0.0.1:0") -> AsyncIterator[str]:
    """The worker serves inside the block; gives its address."""
    bound = await worker.start(address)
    try:
        yield bound
    finally:
        await worker.stop()


def fake_worker(model: FakeModel | None = None, **hooks: Any) -> AbstractAsyncContextManager[str]:
    """A rank of its own; gives its address."""
    return serving(FakeWorker(model or FakeModel(), **hooks))


class FakeSupervisor(SupervisorServicer):
    """Replaces a fake rank by a new one, on another port. Start and stop it like a FakeWorker.

    `may_start` holds the next rank back while it is cleared; `failure` says why, meanwhile.
    """

    def __init__(self, make: Callable[[], FakeWorker]) -> None:
        self.worker = make()
        self.reasons: list[str] = []
        self.exits: list[pb.RankExit] = []  # newest first
        self.may_start = asyncio.Event()
        self.may_start.set()
        self.failure = ""
        self.activity = pb.ACTIVITY_UNKNOWN  # of the living rank
        self.num_watched = 0  # times that it was asked for it
        self.sleep_level = 0  # 0 = awake
        self._ended_at: list[float] = []  # parallel to exits
        self._make = make
        self._address = ""
        self._ready = False
        self._replacing = asyncio.Lock()
        self._tasks = asyncio.TaskGroup()
        self._server = Server([pb.DESCRIPTOR.services_by_name["Supervisor"]])

    async def start(self) -> str:
        """Start the rank, and listen."""
        await self._tasks.__aenter__()
        await self._start_rank()
        add_SupervisorServicer_to_server(  # generated
            self, self._server.grpc
        )
        return f"127.0.0.1:{await self._server.start('127.0.0.1:0')}"

    async def stop(self) -> None:
        """Stop both."""
        self.may_start.set()
        await self._tasks.__aexit__(None, None, None)
        await self._server.stop(grace_s=0)
        await self.worker.stop()

    async def __aenter__(self) -> str:
        return await self.start()

    async def __aexit__(self, *error: object) -> None:
        await self.stop()

    async def _start_rank(self) -> None:
        await self.may_start.wait()
        while self.sleep_level:
            await asyncio.sleep(0.005)
        self._address = await self.worker.start()
        self._ready = True

    async def lose(
        self,
        cause: pb.ExitCause = pb.KILLED,
        phase: pb.Phase = pb.FORWARD,
        why: str = "SIGKILL",
        *,
        outside: bool = False,
    ) -> None:
        """The rank ends, and another takes its place. Returns when it is gone."""
        async with self._replacing:
            await self._end(cause, phase, why, outside=outside)

    async def _end(
        self, cause: pb.ExitCause, phase: pb.Phase, why: str, *, outside: bool = False
    ) -> None:
        last = pb.Heartbeat(epoch=self.worker.engine.epoch, phase=phase)
        self.exits.insert(
            0,
            pb.RankExit(pid=self.worker.pid, cause=cause, reason=why, last=last, outside=outside),
        )
        self._ended_at.insert(0, time.monotonic())
        self._ready = False
        await self.worker.stop()
        self.worker = self._make()
        self._tasks.create_task(self._start_rank())

    async def Status(
        self, request: pb.SupervisorStatusRequest, context: Any
    ) -> pb.SupervisorStatus:
        """Where the rank is now, and how earlier ones ended."""
        self.num_watched += request.watch_ms > 0
        for exit_, ended_at in zip(self.exits, self._ended_at, strict=True):
            exit_.age_s = time.monotonic() - ended_at
        return pb.SupervisorStatus(
            pid=os.getpid(),
            rank=self.worker.engine.rank,
            rank_state=pb.ASLEEP if self.sleep_level else pb.READY if self._ready else pb.DEAD,
            sleep_level=self.sleep_level,
            rank_pid=self.worker.pid,
            rank_address=self._address,
            restarts=len(self.exits),
            exits=self.exits,
            failure=self.failure,
            activity=self.activity,
        )

    async def Restart(self, request: pb.RestartRequest, context: Any) -> pb.RestartResponse:
        """Stop the rank and start another, unless it has ended already."""
        self.reasons.append(request.reason)
        async with self._replacing:
            if request.expected_pid not in (0, self.worker.pid):
                return pb.RestartResponse(restarted=False)
            await self._end(pb.REQUESTED, pb.FORWARD, request.reason)
        return pb.RestartResponse(restarted=True)

    async def Sleep(self, request: pb.SleepRequest, context: Any) -> pb.SleepResponse:
        """Stop the rank and start no other before Wake."""
        async with self._replacing:
            self.sleep_level = max(self.sleep_level, request.level)
            if self._ready:
                await self._end(pb.REQUESTED, pb.FORWARD, "sleep")
        return pb.SleepResponse(held_weight_bytes=0 if self.sleep_level > 1 else 100)

    async def Wake(self, request: pb.WakeRequest, context: Any) -> pb.WakeResponse:
        """Start a rank."""
        self.sleep_level = 0
        return pb.WakeResponse()
