"""Requests through a real scheduler and a fake worker over gRPC."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
from fake_model import FakeModel
from fake_worker import fake_worker
from surestep_common.rpc import connect
from surestep_proto import engine_pb2
from surestep_proto import generate_pb2 as pb
from surestep_proto.generate_pb2_grpc import SchedulerStub
from surestep_scheduler.config import SchedulerSettings
from surestep_scheduler.server import running


def settings(workers: Sequence[str], **changes: Any) -> SchedulerSettings:
    values = {"scheduler_listen": "127.0.0.1:0", "max_num_batched_tokens": 64, "drain_timeout_s": 0}
    return SchedulerSettings(worker_addresses=list(workers), **(values | changes))


@asynccontextmanager
async def client(address: str) -> AsyncIterator[SchedulerStub]:
    channel = connect(address)
    stub = SchedulerStub(channel)
    try:
        async with asyncio.timeout(10):
            while (await stub.Status(pb.SchedulerStatusRequest())).state != pb.SERVING:
                await asyncio.sleep(0.01)
        yield stub
    finally:
        await channel.close()


def request(index: int, length: int = 10, max_tokens: int = 20) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        request_id=f"r{index}",
        prompt_ids=[(7 * index + i) % 101 for i in range(length)],
        max_tokens=max_tokens,
        sampling=engine_pb2.SamplingParams(
            top_p=1, repetition_penalty=1, seed=index, stop_token_ids=[3]
        ),
    )


async def tokens_of(stub: SchedulerStub, message: pb.GenerateRequest) -> list[int]:
    tokens: list[int] = []
    async for chunk in stub.Generate(message, timeout=20):
        tokens += chunk.token_ids
    return tokens


@pytest.mark.parametrize("depth", [0, 1, 2])
async def test_concurrent_requests(depth: int) -> None:
    model = FakeModel()
    async with (
        fake_worker(model) as worker,
        running(settings([worker], pipeline_depth=depth)) as address,
        client(address) as stub,
    ):
        messages = [request(i, 1 + i % 40, 1 + i % 50) for i in range(64)]
        answers = await asyncio.gather(*(tokens_of(stub, m) for m in messages))
        for message, answer in zip(messages, answers, strict=True):
            assert answer == model.complete(
                message.prompt_ids, message.max_tokens, message.sampling
            )
        stats = await stub.Stats(pb.StatsRequest())
        assert (stats.num_running, stats.num_waiting, stats.num_blocks_used) == (0, 0, 0)
