"""A real gRPC Worker service around FakeEngine, for tests of everything in front of a worker."""

from __future__ import annotations

import asyncio
import os
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
from fake_engine import FakeEngine
from fake_model import Drafter, FakeModel, StatusOf
from surestep_common.rpc import Server
from surestep_proto import engine_pb2 as pb
from surestep_proto.engine_pb2_grpc import WorkerServicer, add_WorkerServicer_to_server

BeforeStep = Callable[[pb.StepPlan], Awaitable[None]]


async def _at_once(plan: pb.StepPlan) -> None:
    """A step takes no time."""


class FakeWorker(WorkerServicer):
    """One rank. `before_step` may delay, hang or raise; `perturb` is added to every digest."""

    def __init__(
        self,
        model: FakeModel,
        *,
        rank: int = 0,
        world_size: int = 1,
        before_step: BeforeStep = _at_once,
        drafter: Drafter | None = None,
        status_of: StatusOf | None = None,
        perturb: int = 0,
    ) -> None:
        self.model = model
        self.engine = FakeEngine(model, drafter=drafter, status_of=status_of, rank=rank)
        self.num_streams = 0
        self._world_size = world_size
        self._before_step = before_step
        self._perturb = perturb
        self._instance_id = uuid.uuid4().hex
        self._server: Server | None = None

    async def start(self, address: str = "127.0.0.1:0") -> str:
        """Listen; returns host:port."""
        self._server = Server([pb.DESCRIPTOR.services_by_name["Worker"]])
        add_WorkerServicer_to_server(self, self._server.grpc)
        port = await self._server.start(address)
        await self._server.set_serving(True)
        return f"127.0.0.1:{port}"

    async def stop(self) -> None:
        """Die at once: open streams are cut."""
        assert self._server is not None
        await self._server.stop(grace_s=0)

    async def Info(self, request: pb.WorkerInfoRequest, context: Any) -> pb.WorkerInfo:
        """Facts of the fake model."""
        model = self.model
        return pb.WorkerInfo(
            rank=self.engine.rank,
            world_size=self._world_size,
            pid=os.getpid(),
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
            max_step_tokens=model.max_step_tokens,
            drafter="fake" if model.max_draft_tokens else "",
            max_draft_tokens=model.max_draft_tokens,
            last_epoch=self.engine.epoch,
            last_step=self.engine.step,
            eos_token_ids=[0],
        )

    async def Run(
        self, requests: AsyncIterator[pb.StepPlan], context: Any
    ) -> AsyncIterator[pb.StepResult]:
        """Execute plans until a newer stream takes over."""
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
            result.digest = (result.digest + self._perturb) % (1 << 64)
            yield result


@asynccontextmanager
async def fake_worker(model: FakeModel | None = None, **hooks: Any) -> AsyncIterator[str]:
    """A single rank serving inside the block; gives its address."""
    worker = FakeWorker(model or FakeModel(), **hooks)
    address = await worker.start()
    try:
        yield address
    finally:
        await worker.stop()


async def hang(plan: pb.StepPlan) -> None:
    """A `before_step` that never returns."""
    await asyncio.Event().wait()
