"""vllm.grpc.engine of a real scheduler, asked by a client that knows nothing but the numbers."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import grpc
import pytest
from support.clients.vllm_calls import MODEL, PROMPT, ask, served, tokens_of
from support.clients.vllm_wire import WireAnswer, WireClient, new
from support.fakes.worker import FakeWorker, fake_worker, serving
from support.processes.scheduler_harness import (
    Client,
    Gate,
    code_of,
    expected,
    make_request,
    make_settings,
    scheduler,
    stub_of,
    trailing,
)
from surestep_common.rpc import connect
from surestep_scheduler.server import running


async def test_a_stream_has_chunks_and_then_the_whole() -> None:
    async with served() as (client, wire):
        answer = await wire.generate(ask())
        await client.idle()
    (end,) = answer.ends
    assert answer.tokens() == list(end.output_ids) == tokens_of()
    assert answer.responses[-1].HasField("complete")
    assert all(chunk.completion_tokens == len(chunk.token_ids) for chunk in answer.chunks)
    assert {chunk.prompt_tokens for chunk in answer.chunks} == {5}
    assert (end.finish_reason, end.prompt_tokens, end.completion_tokens) == ("length", 5, 12)
    assert 0 < end.spec_accepted_tokens <= end.spec_draft_tokens
    assert answer.trailing == {}


async def test_without_a_stream_there_is_one_message() -> None:
    async with served() as (_, wire):
        answer = await wire.generate(ask(stream=False))
    (end,) = answer.ends
    assert answer.chunks == []
    assert list(end.output_ids) == tokens_of()


@pytest.mark.parametrize("stream", [True, False])
async def test_every_sequence_has_its_own_tokens(stream: bool) -> None:
    async with served() as (_, wire):
        answer = await wire.generate(ask(n=5, stream=stream, temperature=0.7))
    assert [end.index for end in answer.ends] == list(range(5))
    for end in answer.ends:
        assert list(end.output_ids) == tokens_of(end.index)
        if stream:
            assert answer.tokens(end.index) == list(end.output_ids)
    assert len({tuple(end.output_ids) for end in answer.ends}) == 5


async def test_what_scheduler_and_engine_service_answer_is_the_same() -> None:
    message = make_request(4, length=9, max_tokens=30)
    async with served() as (client, wire):
        own = (await client.generate(message)).tokens
        theirs = new(
            "GenerateRequest",
            request_id="theirs",
            tokenized={"input_ids": list(message.prompt_ids)},
            sampling_params={"seed": 4, "max_tokens": 30, "stop_token_ids": [3]},
        )
        answer = await wire.generate(theirs)
    assert list(answer.ends[0].output_ids) == own


async def test_a_stop_token_is_named_and_the_models_own_is_not() -> None:
    stop = tokens_of()[4]
    async with served() as (_, wire):
        (end,) = (await wire.generate(ask(stop_token_ids=[1, stop]))).ends
    assert (end.finish_reason, end.matched_token_id) == ("stop", stop)
    assert list(end.output_ids) == tokens_of()[:5]
    async with served(replace(MODEL, eos_token_ids=(stop,))) as (_, wire):
        (eos,) = (await wire.generate(ask("b", stop_token_ids=[stop]))).ends
        (ignored,) = (await wire.generate(ask("c", ignore_eos=True))).ends
        (both,) = (await wire.generate(ask("d", ignore_eos=True, stop_token_ids=[stop]))).ends
    assert (eos.finish_reason, eos.HasField("matched_token_id")) == ("stop", False)
    assert (ignored.finish_reason, len(ignored.output_ids)) == ("length", 12)
    assert (both.finish_reason, both.matched_token_id) == ("stop", stop)


@pytest.mark.parametrize("stream", [True, False])
async def test_log_probabilities_stand_beside_their_tokens(stream: bool) -> None:
    async with served() as (_, wire):
        answer = await wire.generate(ask(stream=stream, logprobs=2, prompt_logprobs=1))
    holders = answer.chunks if stream else answer.ends
    for holder in holders:
        ids = list(holder.token_ids if stream else holder.output_ids)
        told = holder.output_logprobs
        assert list(told.token_ids) == ids
        assert len(told.token_logprobs) == len(told.top_logprobs) == len(ids)
        assert all(len(top.values) == len(top.token_ids) == 2 for top in told.top_logprobs)
    prompts = [holder.input_logprobs for holder in holders if holder.HasField("input_logprobs")]
    (prompt,) = prompts  # in the first chunk alone
    assert list(prompt.token_ids) == PROMPT
    assert [one.HasField("value") for one in prompt.token_logprobs] == [False] + 4 * [True]
    assert [len(top.values) for top in prompt.top_logprobs] == [0, 1, 1, 1, 1]


async def test_no_alternatives_unless_asked_for() -> None:
    async with served() as (_, wire):
        answer = await wire.generate(ask(stream=False, logprobs=0))
        plain = await wire.generate(ask("b", stream=False))
    assert len(answer.ends[0].output_logprobs.token_logprobs) == 12
    assert list(answer.ends[0].output_logprobs.top_logprobs) == []
    assert not plain.ends[0].HasField("output_logprobs")


async def test_what_has_no_effect_is_told() -> None:
    async with served() as (_, wire):
        answer = await wire.generate(ask(stop=["\n"], of_a_later_version=1))
    assert list(answer.ends[0].output_ids) == tokens_of()
    assert answer.trailing == {"surestep-without-effect": "stop,sampling_params.field 900"}


@pytest.mark.parametrize("stream", [True, False])
async def test_an_aborted_request_ends_with_what_has_come_of_it(stream: bool) -> None:
    gate = Gate(epoch=1, steps=6)
    async with served(gate=gate) as (client, wire):
        reading = asyncio.ensure_future(wire.generate(ask(n=2, max_tokens=90, stream=stream)))
        other = asyncio.ensure_future(wire.generate(ask("b")))
        await gate.reached.wait()
        await wire.ask("Abort", request_ids=["a", "nobody's"])
        answer: WireAnswer = await reading
        stats = await client.until(lambda stats: stats.num_aborted_requests == 2)
        assert stats.num_running == 1
        gate.opened.set()
        assert list((await other).ends[0].output_ids) == tokens_of()
        await wire.ask("Abort", request_ids=["a", "b"])  # they are gone, and nobody minds
        assert (await client.idle()).num_blocks_used == 0
    assert [end.finish_reason for end in answer.ends] == ["abort", "abort"]
    for end in answer.ends:
        kept = list(end.output_ids)
        assert 0 < len(kept) < 90
        assert kept == tokens_of(end.index, 90)[: len(kept)]


async def test_requests_of_other_services_are_not_aborted() -> None:
    gate = Gate(epoch=1, steps=2)
    async with served(gate=gate) as (client, wire):
        own = asyncio.ensure_future(client.generate(make_request(1)))
        await gate.reached.wait()
        await wire.ask("Abort", request_ids=["r1"])
        gate.opened.set()
        assert (await own).tokens == expected(MODEL, make_request(1))
        assert (await client.stats()).num_aborted_requests == 0


async def test_a_cancelled_call_frees_everything() -> None:
    gate = Gate(epoch=1, steps=6)
    async with served(gate=gate) as (client, wire):
        call = wire.call("Generate", ask(n=3, max_tokens=90))
        await call.read()
        await gate.reached.wait()
        call.cancel()
        stats = await client.until(lambda stats: stats.num_aborted_requests == 3)
        gate.opened.set()
        stats = await client.idle()
        assert stats.num_blocks_used == 0
        answer = await wire.generate(ask())  # the id is free again
    assert list(answer.ends[0].output_ids) == tokens_of()


async def test_a_deadline_ends_the_request() -> None:
    gate = Gate(epoch=1, steps=2)
    async with served(gate=gate) as (client, wire):
        error = await code_of(wire.generate(ask(n=2, max_tokens=90), timeout_s=0.3))
        assert error.code() == grpc.StatusCode.DEADLINE_EXCEEDED
        gate.opened.set()
        assert (await client.idle()).num_aborted_requests == 2


@pytest.mark.parametrize("count", [1, 2])
async def test_an_open_id_is_refused(count: int) -> None:
    gate = Gate(epoch=1, steps=2)
    async with served(gate=gate) as (_, wire):
        first = asyncio.ensure_future(wire.generate(ask()))
        await gate.reached.wait()
        error = await code_of(wire.generate(ask(n=count)))
        assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert error.details() == "request 'a' is open already"
        gate.opened.set()
        assert list((await first).ends[0].output_ids) == tokens_of()


async def test_ids_of_other_services_are_no_hindrance() -> None:
    gate = Gate(epoch=1, steps=2)
    async with served(gate=gate) as (client, wire):
        own = asyncio.ensure_future(client.generate(make_request(1)))
        await gate.reached.wait()
        gate.opened.set()
        answer = await wire.generate(ask("r1"))
        assert (await own).tokens == expected(MODEL, make_request(1))
    assert list(answer.ends[0].output_ids) == tokens_of()


async def test_a_full_queue_refuses_all_sequences() -> None:
    gate = Gate(epoch=1, steps=0)
    async with served(gate=gate, max_num_seqs=1, max_queue_len=3) as (client, wire):
        first = asyncio.ensure_future(wire.generate(ask()))
        await gate.reached.wait()
        error = await code_of(wire.generate(ask("b", n=5)))
        assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert float(trailing(error)["retry-after"]) >= 1
        await client.until(lambda stats: stats.num_waiting == 0)
        gate.opened.set()
        assert list((await first).ends[0].output_ids) == tokens_of()


@pytest.mark.parametrize("depth", [0, 1, 2])
async def test_a_killed_worker_costs_no_token(depth: int) -> None:
    gate = Gate(epoch=1, steps=8)
    worker = FakeWorker(MODEL, before_step=gate)
    address = await worker.start()
    async with scheduler(make_settings([address], pipeline_depth=depth)) as client:
        wire = WireClient(client.channel)
        reading = asyncio.ensure_future(wire.generate(ask(n=4, max_tokens=60)))
        await gate.reached.wait()
        await worker.stop()
        await client.health(serving=False)
        sick = await wire.ask("HealthCheck")
        assert (sick.healthy, sick.message[:11]) == (False, "recovering:")
        assert (await wire.ask("GetModelInfo")).model_path == "fake"  # still known
        async with serving(FakeWorker(MODEL), address):
            answer: WireAnswer = await reading
            stats = await client.idle()
            assert (await wire.ask("HealthCheck")).healthy
    assert stats.num_replayed_requests > 0
    for end in answer.ends:
        assert answer.tokens(end.index) == list(end.output_ids) == tokens_of(end.index, 60)


@pytest.mark.parametrize(
    ("code", "changes"),
    [
        (grpc.StatusCode.INVALID_ARGUMENT, {"tokenized": None, "text": "hello"}),
        (grpc.StatusCode.INVALID_ARGUMENT, {"tokenized": {"input_ids": [101]}}),
        (grpc.StatusCode.INVALID_ARGUMENT, {"sampling_params": {"structural_tag": "{}"}}),
        (grpc.StatusCode.INVALID_ARGUMENT, {"sampling_params": {"temperature": -1.0}}),
        (grpc.StatusCode.INVALID_ARGUMENT, {"sampling_params": {"max_tokens": 0}}),
        (grpc.StatusCode.INVALID_ARGUMENT, {"request_id": "x" * 600}),
        (grpc.StatusCode.OUT_OF_RANGE, {"tokenized": {"input_ids": [1] * 200}}),
    ],
)
async def test_refusals_are_those_of_our_table(
    code: grpc.StatusCode, changes: dict[str, Any]
) -> None:
    values: dict[str, Any] = {"request_id": "a", "tokenized": {"input_ids": PROMPT}, **changes}
    async with served() as (client, wire):
        error = await code_of(wire.generate(new("GenerateRequest", **values)))
        assert (await client.idle()).finished_requests == {}
        assert list((await wire.generate(ask())).ends[0].output_ids) == tokens_of()
    assert error.code() == code
    assert trailing(error)["surestep-param"]


async def test_a_message_beyond_the_bound_is_refused_unread() -> None:
    async with served() as (_, wire):
        request = ask()
        request.tokenized.original_text = "x" * (9 << 20)
        error = await code_of(wire.generate(request))
    assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_a_draining_scheduler_finishes_what_is_open() -> None:
    gate = Gate(epoch=1, steps=2)
    async with fake_worker(MODEL, before_step=gate) as worker, asyncio.TaskGroup() as tasks:
        async with running(make_settings([worker])) as address:
            channel = connect(address)
            wire = WireClient(channel)
            await Client(stub_of(channel), channel).health()
            reading = tasks.create_task(wire.generate(ask(n=2)))
            await gate.reached.wait()
            tasks.create_task(_open_when_refused(wire, gate))
        answer: WireAnswer = await reading
        await channel.close(None)
    assert [list(end.output_ids) for end in answer.ends] == [tokens_of(0), tokens_of(1)]


async def _open_when_refused(wire: WireClient, gate: Gate) -> None:
    """It drains once it says so; until then it takes requests, and keeps them."""
    while (await wire.ask("HealthCheck")).healthy:
        await asyncio.sleep(0)
    error = await code_of(wire.generate(ask("late")))
    assert error.code() == grpc.StatusCode.UNAVAILABLE
    gate.opened.set()
