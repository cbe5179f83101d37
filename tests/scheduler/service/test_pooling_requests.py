"""Requests for vectors through a real scheduler and fake workers over gRPC."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest
from support.clients.vector_requests import POOLINGS, labels_of
from support.fakes.model import FakeModel
from support.fakes.worker import FakeSupervisor, FakeWorker, fake_worker
from support.processes.scheduler_harness import (
    code_of,
    make_request,
    make_settings,
    scheduler,
    trailing,
)
from surestep_proto import sampling_pb2, worker_pb2
from surestep_proto import scheduler_pb2 as pb

MODEL = FakeModel()
LONGEST = MODEL.max_model_len


def for_a_vector(
    index: int, length: int = 10, pooling: sampling_pb2.Pooling = sampling_pb2.MEAN, **changes: Any
) -> pb.GenerateRequest:
    """The prompt of `make_request`, pooled."""
    message = make_request(index, length)
    values: dict[str, Any] = {
        "request_id": f"v{index}",
        "prompt_ids": message.prompt_ids,
        "pooling": pooling,
        "label_ids": labels_of(pooling),
    }
    return pb.GenerateRequest(**(values | changes))


def any_of(index: int) -> sampling_pb2.Pooling:
    return list(POOLINGS.values())[index % 3]


def vector_of(message: pb.GenerateRequest) -> bytes:
    return MODEL.vector(message.prompt_ids, message.pooling, message.label_ids)


@pytest.mark.parametrize("depth", [0, 1, 2])
async def test_vectors_come_beside_tokens(depth: int) -> None:
    vectors = [for_a_vector(i, 1 + i * 3, any_of(i)) for i in range(40)]
    texts = [make_request(i, 1 + i % 40, 1 + i % 50) for i in range(20)]
    async with (
        fake_worker(MODEL) as worker,
        scheduler(make_settings([worker], pipeline_depth=depth)) as client,
    ):
        answers = await asyncio.gather(*map(client.generate, [*vectors, *texts]))
        stats = await client.idle()
    for message, answer in zip(vectors, answers, strict=False):
        (chunk,) = answer.chunks
        assert chunk.pooled == vector_of(message)
        assert chunk.finish_reason == pb.POOLED
        assert chunk.start.model_fingerprint
        assert answer.end
        assert not chunk.token_ids
        assert not chunk.start.HasField("resolved")
    assert stats.finished_requests["pooled"] == len(vectors)
    assert stats.num_blocks_used == 0
    emitted = sum(len(answer.tokens) for answer in answers[len(vectors) :])
    assert stats.generation_tokens == emitted


async def test_vectors_survive_the_workers() -> None:
    """A rank dies in the middle of every prompt; each starts over."""

    async def dies(plan: worker_pb2.StepPlan) -> None:
        if (plan.epoch, plan.step) == (1, 4):
            raise RuntimeError("illegal memory access")

    messages = [for_a_vector(i, 100, any_of(i)) for i in range(8)]
    async with (
        FakeSupervisor(lambda: FakeWorker(MODEL, before_step=dies)) as address,
        scheduler(make_settings([], supervisor_addresses=[address])) as client,
    ):
        answers = await asyncio.gather(*map(client.generate, messages))
        stats = await client.idle()
    for message, answer in zip(messages, answers, strict=True):
        assert answer.chunks[0].pooled == vector_of(message)
    assert stats.num_replayed_requests > 0


async def test_a_prompt_may_fill_the_context() -> None:
    async with fake_worker(MODEL) as worker, scheduler(make_settings([worker])) as client:
        info = await client.stub.Info(pb.SchedulerInfoRequest(), timeout=5)
        assert (info.max_pooled_len, info.hidden_size, info.headless) == (LONGEST, 2, False)
        whole = for_a_vector(1, LONGEST)
        answer = await client.generate(whole)
        assert answer.chunks[0].pooled == vector_of(whole)
        error = await code_of(client.generate(for_a_vector(2, LONGEST + 1)))
    assert error.code() is grpc.StatusCode.OUT_OF_RANGE
    assert "cannot be pooled: the limit is 128" in (error.details() or "")


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"max_tokens": 1}, "max_tokens"),
        ({"emitted_ids": [1]}, "emitted_ids"),
        ({"sampling": sampling_pb2.SamplingParams(top_p=1)}, "sampling"),
        ({"num_draft_tokens": 0}, "num_draft_tokens"),
        ({"ignore_eos": True}, "ignore_eos"),
        ({"resolved": pb.ResolvedParams()}, "resolved"),
        ({"pooling": 4}, "pooling"),
        ({"label_ids": [1]}, "label_ids"),
        ({"pooling": sampling_pb2.LABEL_LOGITS, "label_ids": []}, "label_ids"),
        ({"pooling": sampling_pb2.LABEL_LOGITS, "label_ids": [101]}, "label_ids"),
        ({"pooling": sampling_pb2.LABEL_LOGITS, "label_ids": [1] * 65}, "label_ids"),
        ({"prompt_ids": []}, "prompt_ids"),
    ],
)
async def test_what_has_no_meaning_is_refused_by_name(changes: dict[str, Any], param: str) -> None:
    async with fake_worker(MODEL) as worker, scheduler(make_settings([worker])) as client:
        error = await code_of(client.generate(for_a_vector(1, **changes)))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert trailing(error)["surestep-param"] == param


async def test_a_model_without_head_serves_vectors_alone_and_shows_that_it_lives(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("surestep_scheduler.engine.epoch.CANARY_INTERVAL_S", 0.01)
    async with (
        fake_worker(FakeModel(headless=True, max_draft_tokens=0)) as worker,
        scheduler(make_settings([worker])) as client,
    ):
        for refused in (make_request(1), for_a_vector(2, pooling=sampling_pb2.LABEL_LOGITS)):
            error = await code_of(client.generate(refused))
            assert trailing(error)["surestep-param"] == "pooling"
        stats = await client.until(lambda stats: stats.num_canaries > 1)
        message = for_a_vector(1)
        answer = await client.generate(message)
    assert answer.chunks[0].pooled == vector_of(message)
    assert stats.generation_tokens == 0


async def test_a_prompt_that_ends_the_workers_is_found() -> None:
    """Among others that want vectors; they get theirs."""

    class Poisoned(FakeWorker):
        def __init__(self) -> None:
            super().__init__(MODEL, before_step=self.look)

        async def look(self, plan: worker_pb2.StepPlan) -> None:
            names = {slot: s.admission.request_id for slot, s in self.engine.slots.items()}
            names |= {admission.slot: admission.request_id for admission in plan.admissions}
            if any(names[slot] == "v3" for slot in plan.slot):
                raise RuntimeError("illegal memory access")

    messages = [for_a_vector(i, 60, any_of(i)) for i in range(8)]
    async with (
        FakeSupervisor(Poisoned) as address,
        scheduler(make_settings([], supervisor_addresses=[address])) as client,
    ):
        answers = await asyncio.gather(*map(client.generate, messages), return_exceptions=True)
    for index, (message, answer) in enumerate(zip(messages, answers, strict=True)):
        if index == 3:
            assert isinstance(answer, grpc.aio.AioRpcError)
            assert answer.code() is grpc.StatusCode.DATA_LOSS
        else:
            assert not isinstance(answer, BaseException)
            assert answer.chunks[0].pooled == vector_of(message)
