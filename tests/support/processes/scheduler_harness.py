"""A scheduler in front of fake workers, and a client in front of the scheduler."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from support.fakes.model import FakeModel
from surestep_common.rpc import connect
from surestep_proto import sampling_pb2, worker_pb2
from surestep_proto import scheduler_pb2 as pb
from surestep_proto.scheduler_pb2_grpc import SchedulerStub
from surestep_scheduler.config import SchedulerSettings
from surestep_scheduler.server import running

STOP = 3
TIMEOUT_S = 100  # less than a test may take, and much more than what is waited for takes
_POLL_S = 0.005  # the scheduler is in this process, and has to get on meanwhile
_SERVICE = pb.DESCRIPTOR.services_by_name["Scheduler"].full_name


def make_settings(workers: Sequence[str], **changes: Any) -> SchedulerSettings:
    """Settings with small sizes and a free port."""
    values: dict[str, Any] = {
        "scheduler_listen": "127.0.0.1:0",
        "max_num_batched_tokens": 64,
        "drain_timeout_s": 5,
    }
    return SchedulerSettings(worker_addresses=list(workers), **(values | changes))


class Client(NamedTuple):
    """A channel to a scheduler."""

    stub: Any
    channel: grpc.aio.Channel

    async def health(self, serving: bool = True) -> None:
        """Wait until the service reports this health."""
        wanted = health_pb2.HealthCheckResponse.SERVING if serving else 2
        watch = health_pb2_grpc.HealthStub(self.channel).Watch(
            health_pb2.HealthCheckRequest(service=_SERVICE), timeout=TIMEOUT_S, wait_for_ready=True
        )  # gRPC remembers that an address refused, for a server that had this port before
        async for answer in watch:
            if answer.status == wanted:
                break
        watch.cancel()

    async def stats(self) -> pb.SchedulerStats:
        """Counters and gauges."""
        stats: pb.SchedulerStats = await self.stub.Stats(pb.StatsRequest(), timeout=TIMEOUT_S)
        return stats

    async def until(self, condition: Callable[[pb.SchedulerStats], bool]) -> pb.SchedulerStats:
        """The first counters that fulfil a condition."""
        async with asyncio.timeout(TIMEOUT_S):
            while not condition(stats := await self.stats()):
                await asyncio.sleep(_POLL_S)
        return stats

    async def idle(self) -> pb.SchedulerStats:
        """Counters once nothing runs and nothing waits any more."""
        return await self.until(lambda s: not (s.num_running or s.num_waiting or s.num_slots_used))

    async def generate(self, message: pb.GenerateRequest, timeout_s: float = TIMEOUT_S) -> Answer:
        """All chunks of a request."""
        call = self.stub.Generate(message, timeout=timeout_s)
        return Answer([chunk async for chunk in call])


class Answer(NamedTuple):
    """What came back for a request."""

    chunks: list[pb.GenerateChunk]

    @property
    def tokens(self) -> list[int]:
        """All tokens."""
        return [token for chunk in self.chunks for token in chunk.token_ids]

    @property
    def end(self) -> pb.RequestEnd:
        """Figures of the last chunk."""
        assert self.chunks[-1].HasField("end")
        return self.chunks[-1].end


def stub_of(channel: grpc.aio.Channel) -> Any:
    """Typed stubs know no aio calls."""
    return SchedulerStub(channel)


@asynccontextmanager
async def scheduler(settings: SchedulerSettings, serving: bool = True) -> AsyncIterator[Client]:
    """A scheduler in this process, with a client; waits until it serves."""
    async with running(settings) as address:
        channel = connect(address)
        client = Client(stub_of(channel), channel)
        try:
            if serving:
                await client.health()
            yield client
        finally:
            await channel.close(None)


def make_request(
    index: int, length: int = 10, max_tokens: int = 20, **sampling: Any
) -> pb.GenerateRequest:
    """A request that differs from those of other indices in prompt and seed."""
    values: dict[str, Any] = {
        "top_p": 1,
        "repetition_penalty": 1,
        "seed": index,
        "stop_token_ids": [STOP],
    }
    return pb.GenerateRequest(
        request_id=f"r{index}",
        prompt_ids=[(7 * index + i) % 101 for i in range(length)],
        max_tokens=max_tokens,
        sampling=sampling_pb2.SamplingParams(**(values | sampling)),
    )


def expected(model: FakeModel, message: pb.GenerateRequest) -> list[int]:
    """Tokens of a direct evaluation."""
    return model.complete(message.prompt_ids, message.max_tokens, message.sampling)


class Gate:
    """A `before_step` that lets steps of an epoch run up to a number, then holds them."""

    def __init__(self, epoch: int, steps: int) -> None:
        self._epoch = epoch
        self._steps = steps
        self.reached = asyncio.Event()
        self.opened = asyncio.Event()

    async def __call__(self, plan: worker_pb2.StepPlan) -> None:
        """Pass or wait."""
        if plan.epoch == self._epoch and plan.step > self._steps:
            self.reached.set()
            await self.opened.wait()


def trailing(error: grpc.aio.AioRpcError) -> dict[str, str]:
    """Trailing metadata of a failed call."""
    metadata: Any = error.trailing_metadata()
    return dict(metadata)


async def code_of(call: Awaitable[Any]) -> grpc.aio.AioRpcError:
    """The error a call ends with."""
    try:
        await call
    except grpc.aio.AioRpcError as error:
        return error
    raise AssertionError("the call succeeded")
