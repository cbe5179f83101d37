"""The model behind the gateway changes: nobody gets an answer in two voices, operators hear of it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator

import pytest
from support.fakes.scheduler import FakeScheduler, Script, default_info, emulated, start, tokens
from support.processes.gateway_stack import Stack, StartStack
from surestep_common.errors import ConnectionLost, ModelChanged
from surestep_common.healthcheck import trouble
from surestep_common.request_params import SHAPING, neutral
from surestep_proto.sampling_pb2 import SamplingDefaults
from surestep_proto.scheduler_pb2 import LENGTH, GenerateChunk, GenerateRequest, ResolvedParams

BODY = {"prompt": "the quick brown", "max_tokens": 12, "seed": 4, "return_token_ids": True}


def serving_model(model: str, lost_after: int | None = None) -> Script:
    """A script of a scheduler with this model, which is lost after some tokens of a first call."""

    async def script(request: GenerateRequest) -> AsyncIterator[GenerateChunk]:
        if request.model_fingerprint not in ("", model):
            raise ModelChanged("the request was begun with another model than is served here")
        yield start(model=model)
        ids = emulated(request)
        if lost_after is not None and not request.emitted_ids:
            for token in ids[:lost_after]:
                yield tokens([token])
            raise ConnectionLost("gone")
        yield tokens(ids, finish=LENGTH)

    return script


def give(scheduler: FakeScheduler, model: str, lost_after: int | None = None) -> None:
    scheduler.info = default_info(model_fingerprint=model)
    scheduler.script = serving_model(model, lost_after)


async def learn(stack: Stack) -> None:
    """Schedulers stop serving and serve again, so that the gateway asks what."""
    for scheduler in stack.schedulers:
        await scheduler.set_serving(False)
    await stack.until_serving(0)
    for scheduler in stack.schedulers:
        await scheduler.set_serving(True)
    await stack.until_serving(len(stack.schedulers))


async def test_a_resumed_request_names_the_model_that_began_it(stack: Stack) -> None:
    give(stack.scheduler, "a", lost_after=5)
    answer = await stack.client.post("/v1/completions", json=BODY)
    assert answer.status_code == 200
    first, second = stack.scheduler.requests
    assert (first.model_fingerprint, second.model_fingerprint) == ("", "a")
    assert len(second.emitted_ids) == 5
    assert list(second.emitted_ids) == emulated(first)[:5]


async def test_a_resumed_request_goes_on_as_it_was_begun(stack: Stack) -> None:
    """The body says nothing; what the first scheduler made of that holds at the next one."""
    begun = ResolvedParams(temperature=0.5, top_p=0.75, seed=4, max_tokens=9)

    async def script(request: GenerateRequest) -> AsyncIterator[GenerateChunk]:
        opening = start()
        opening.start.resolved.CopyFrom(begun)
        begun.temperature += 1  # nobody should note what later calls say
        yield opening
        if not request.emitted_ids:
            yield tokens([3, 4])
            raise ConnectionLost("gone")
        yield tokens([5], finish=LENGTH)

    stack.scheduler.script = script
    answer = await stack.chat(seed=4)
    assert answer.status_code == 200
    first, second = stack.scheduler.requests
    assert not first.HasField("resolved")
    assert not first.HasField("max_tokens")
    assert not first.sampling.HasField("temperature")
    assert second.resolved == ResolvedParams(temperature=0.5, top_p=0.75, seed=4, max_tokens=9)
    assert second.sampling == first.sampling


@pytest.mark.parametrize("given", [None, False, True])
async def test_the_scheduler_is_told_whether_eos_counts(stack: Stack, given: bool | None) -> None:
    body = BODY | {"ignore_eos": given, "stop_token_ids": [7]}
    assert (await stack.client.post("/v1/completions", json=body)).status_code == 200
    (request,) = stack.scheduler.requests
    assert request.ignore_eos == bool(given)
    assert list(request.sampling.stop_token_ids) == [7]  # the scheduler adds the model's own


async def test_cards_show_what_holds_for_requests_that_do_not_say(stack: Stack) -> None:
    plain = {name: getattr(neutral(), name) for name in SHAPING}
    (card,) = (await stack.client.get("/v1/models")).json()["data"]
    assert card["default_sampling_params"] == plain
    defaults = SamplingDefaults(
        temperature=0.6, top_k=20, top_p=0.95, min_p=0.1, presence_penalty=1.5, max_tokens=9
    )
    stack.scheduler.info = default_info(defaults=defaults)
    await learn(stack)
    card = (await stack.client.get(f"/v1/models/{card['id']}")).json()
    assert card["default_sampling_params"] == {
        "temperature": 0.6,
        "top_k": 20,
        "top_p": 0.95,
        "min_p": 0.1,
        "repetition_penalty": 0,
        "presence_penalty": 1.5,
        "frequency_penalty": 0,
        "max_tokens": 9,
    }


async def test_an_answer_does_not_go_on_with_another_model(stack: Stack) -> None:
    async def then_another(request: GenerateRequest) -> AsyncIterator[GenerateChunk]:
        give(stack.scheduler, "b")  # who comes back
        async for chunk in serving_model("a", lost_after=5)(request):
            yield chunk

    stack.scheduler.script = then_another
    response = await stack.client.post("/v1/completions", json=BODY)
    assert response.status_code == 503
    error = response.json()["error"]
    assert error["type"] == "model_changed_error"
    assert "begun with another model" in error["message"]
    assert response.headers["retry-after"]

    stack.scheduler.script = then_another
    events = await stack.stream("/v1/completions", **BODY)
    assert events[-1]["error"]["type"] == "model_changed_error"
    assert sum(len(choice["token_ids"]) for choice in events.choices()) == 5
    assert not events.done

    again = await stack.client.post("/v1/completions", json=BODY)
    assert again.status_code == 200, "a new request is answered by the new model"


async def test_only_replicas_of_the_same_model_go_on(start_stack: StartStack) -> None:
    stack = await start_stack(replicas=3, resume_timeout_s=20)
    for scheduler, model in zip(stack.schedulers, "abb", strict=True):
        give(scheduler, model)
    await learn(stack)
    other, mine = stack.schedulers[0], stack.schedulers[1:]
    for scheduler in mine:
        give(scheduler, "b", lost_after=3)
    for number in range(8):
        body = BODY | {"cache_salt": str(number)}
        assert (await stack.client.post("/v1/completions", json=body)).status_code == 200
    assert all(not request.emitted_ids for request in other.requests)
    assert any(request.emitted_ids for scheduler in mine for request in scheduler.requests)


async def test_a_request_ends_when_only_other_models_are_left(start_stack: StartStack) -> None:
    stack = await start_stack(replicas=2, resume_timeout_s=60)
    first, second = stack.schedulers
    give(first, "a", lost_after=3)
    give(second, "a", lost_after=3)
    await learn(stack)
    for scheduler in stack.schedulers:
        scheduler.info = default_info(model_fingerprint="b")
    await learn(stack)
    async with asyncio.timeout(20):
        response = await stack.client.post("/v1/completions", json=BODY)
    assert response.json()["error"]["type"] == "model_changed_error"


async def test_a_change_is_told_to_operators_once(
    stack: Stack, caplog: pytest.LogCaptureFixture
) -> None:
    give(stack.scheduler, "a")
    await learn(stack)
    with caplog.at_level(logging.WARNING):
        await learn(stack)
        assert caplog.messages == []
        give(stack.scheduler, "b")
        await learn(stack)
        await learn(stack)
    (message,) = caplog.messages
    assert "serves another model now" in message


async def test_what_a_scheduler_waits_for_is_told_to_whoever_asks(start_stack: StartStack) -> None:
    stack = await start_stack(admission_timeout_s=0.2)
    reason = "rank 0 is starting: model.safetensors: cut off"
    stack.scheduler.trouble = reason
    await stack.scheduler.set_serving(False)
    await stack.until_serving(0)
    async with asyncio.timeout(20):
        while reason not in (ready := await stack.client.get("/health/ready")).text:
            await asyncio.sleep(0.02)
    assert ready.status_code == 503
    assert ready.json()["error"]["message"] == f"the model is not ready: {reason}"
    said = await asyncio.to_thread(trouble, f"{stack.url}/health/ready")
    assert said is not None
    assert reason in said
    refused = await stack.client.post("/v1/completions", json=BODY)
    assert refused.status_code == 503
    assert refused.json()["error"]["message"] == f"no scheduler serves: {reason}"
    stack.scheduler.trouble = ""
    await stack.scheduler.set_serving(True)
    await stack.until_serving(1)
    assert (await stack.client.get("/health/ready")).status_code == 200
    assert await asyncio.to_thread(trouble, f"{stack.url}/health/ready") is None
