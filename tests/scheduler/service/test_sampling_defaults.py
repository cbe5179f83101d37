"""Requests that say little, through real schedulers and fake workers over gRPC."""

from __future__ import annotations

import grpc
import pytest
from support.fakes.model import FakeModel
from support.fakes.worker import FakeWorker, fake_worker, serving
from support.processes.scheduler_harness import (
    STOP,
    Answer,
    code_of,
    make_request,
    make_settings,
    scheduler,
)
from surestep_common.request_params import SHAPING
from surestep_proto import scheduler_pb2 as pb
from surestep_proto.sampling_pb2 import SamplingDefaults, SamplingParams
from surestep_proto.worker_pb2 import StepPlan

DEFAULTS = SamplingDefaults(
    temperature=0.5,
    top_k=7,
    top_p=0.75,
    min_p=0.125,
    repetition_penalty=1.25,
    presence_penalty=1.5,
    frequency_penalty=-0.5,
    max_tokens=11,
)
MODEL = FakeModel(defaults=DEFAULTS)


class Seen:
    """A `before_step` that keeps the sampling parameters of every admission."""

    def __init__(self) -> None:
        self.sampling: list[SamplingParams] = []

    async def __call__(self, plan: StepPlan) -> None:
        self.sampling += [admission.sampling for admission in plan.admissions]


def bare(name: str = "a", **fields: object) -> pb.GenerateRequest:
    """As short as a request can be."""
    return pb.GenerateRequest(request_id=name, prompt_ids=[3, 1, 4], **fields)  # type: ignore[arg-type]


def started(answer: Answer) -> pb.RequestStart:
    assert answer.chunks[0].HasField("start")
    return answer.chunks[0].start


async def test_a_bare_request_gets_what_the_model_says() -> None:
    seen = Seen()
    async with (
        fake_worker(MODEL, before_step=seen) as worker,
        scheduler(make_settings([worker])) as client,
    ):
        info = await client.stub.Info(pb.SchedulerInfoRequest(), timeout=5)
        answer = await client.generate(bare())
    assert info.defaults == DEFAULTS
    assert len(answer.tokens) == 11
    assert answer.chunks[-1].finish_reason == pb.LENGTH
    (ranks,) = seen.sampling
    resolved = started(answer).resolved
    for name in SHAPING:
        assert getattr(ranks, name) == getattr(resolved, name) == getattr(DEFAULTS, name)
    assert ranks.seed == resolved.seed
    assert resolved.max_tokens == 11


async def test_without_a_default_length_a_request_has_what_fits() -> None:
    async with (
        fake_worker(FakeModel()) as worker,
        scheduler(make_settings([worker])) as client,
    ):
        answer = await client.generate(bare())
        explicit = await code_of(client.generate(bare("b", max_tokens=0)))
    assert len(answer.tokens) == started(answer).resolved.max_tokens == MODEL.max_model_len - 3
    assert explicit.code() == grpc.StatusCode.INVALID_ARGUMENT


async def test_the_end_of_a_sequence_ends_a_request_unless_it_is_ignored() -> None:
    message = make_request(1, max_tokens=60, stop_token_ids=[])
    whole = FakeModel().complete(message.prompt_ids, 60, message.sampling)
    assert len(whole) == 60
    model = FakeModel(eos_token_ids=(whole[20],))
    async with fake_worker(model) as worker, scheduler(make_settings([worker])) as client:
        ended = await client.generate(message)
        message.request_id, message.ignore_eos = "b", True
        ignored = await client.generate(message)
        message.request_id = "c"
        message.sampling.stop_token_ids.append(whole[20])  # as one that says so itself
        said = await client.generate(message)
    assert ended.tokens == said.tokens == whole[: whole.index(whole[20]) + 1]
    assert ended.chunks[-1].finish_reason == pb.STOP
    assert ignored.tokens == whole


async def test_the_operators_limit() -> None:
    model = FakeModel()
    model.defaults.MergeFrom(SamplingDefaults(max_tokens=5, max_tokens_limit=9))
    async with fake_worker(model) as worker, scheduler(make_settings([worker])) as client:
        assert len((await client.generate(bare("a"))).tokens) == 5
        assert len((await client.generate(bare("b", max_tokens=7))).tokens) == 7
        assert len((await client.generate(bare("c", max_tokens=70))).tokens) == 9
        too_many = bare("d", max_tokens=70, sampling=SamplingParams(min_tokens=10))
        error = await code_of(client.generate(too_many))
    assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert error.details() == "min_tokens=10 exceeds max_tokens=9"


@pytest.mark.parametrize("cut", [1, 4, 10])
async def test_a_request_goes_on_elsewhere_as_it_began(cut: int) -> None:
    """Two schedulers with the same model and other defaults."""
    other = FakeModel(max_model_len=100)
    other.defaults.MergeFrom(SamplingDefaults(max_tokens=3, max_tokens_limit=4))
    here, there = Seen(), Seen()
    async with (
        serving(FakeWorker(MODEL, before_step=here)) as one,
        serving(FakeWorker(other, before_step=there)) as two,
        scheduler(make_settings([one])) as first,
        scheduler(make_settings([two])) as second,
    ):
        whole = await first.generate(bare())
        start = started(whole)
        going_on = bare(
            emitted_ids=whole.tokens[:cut],
            resolved=start.resolved,
            model_fingerprint=start.model_fingerprint,
        )
        rest = await second.generate(going_on)
    assert whole.tokens == [*whole.tokens[:cut], *rest.tokens]
    assert here.sampling == there.sampling
    assert started(rest).resolved == start.resolved
    assert STOP not in here.sampling[0].stop_token_ids
