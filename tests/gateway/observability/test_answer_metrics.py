"""How answers ended: surestep:answers_total, and the last minute in /overview and /status."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from collections.abc import AsyncIterator, Mapping
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from support.fakes.scheduler import failing, start, tokens
from support.processes.gateway_stack import Paused, Stack, StartStack, counted, streaming
from surestep_common.errors import (
    DeadlineExceeded,
    InternalError,
    ModelFault,
    QueueFull,
    SurestepError,
)
from surestep_gateway.observability.clients import Labels
from surestep_proto.scheduler_pb2 import GenerateChunk, GenerateRequest

MESSAGES = [{"role": "user", "content": "hello"}]
# The seed: with some the fake's first token is half a character, which has no event yet.
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 4},
    "/v1/completions": {"prompt": "hello", "max_tokens": 4, "seed": 1},
    "/v1/responses": {"input": "hello", "max_output_tokens": 4, "store": False},
    "/v1/messages": {"model": "tiny", "messages": MESSAGES, "max_tokens": 4},
    "/invocations": {"prompt": "hello", "max_tokens": 4, "seed": 1},
    "/inference/v1/generate": {
        "token_ids": [70, 71],
        "sampling_params": {"max_tokens": 4, "seed": 1},
    },
}
NAMES = ("false", "true")
_GONE = 50  # clients


async def ended(stack: Stack) -> Mapping[Labels, float]:
    """The ways in which answers have ended, with their counts."""
    text = (await stack.client.get("/metrics")).text
    samples = [
        sample
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == "surestep:answers_total"
    ]
    return {Labels(**sample.labels): sample.value for sample in samples if sample.value}


async def until_ended(stack: Stack, labels: Labels) -> None:
    async with asyncio.timeout(15):
        while labels not in await ended(stack):
            await asyncio.sleep(0.02)


async def test_every_api_that_streams_is_tried(stack: Stack) -> None:
    assert BODIES.keys() == set(await streaming(stack)) < set(await counted(stack))


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("path", BODIES)
async def test_answers_that_are_complete(stack: Stack, path: str, streams: bool) -> None:
    response = await stack.client.post(path, json=BODIES[path] | {"stream": streams})
    assert response.status_code == 200, response.text
    assert await ended(stack) == {Labels(path, NAMES[streams], "complete"): 1}


@pytest.mark.parametrize("path", BODIES)
async def test_an_end_for_a_reason_of_another_release_is_no_end(stack: Stack, path: str) -> None:
    async def script(request: GenerateRequest) -> AsyncIterator[GenerateChunk]:
        yield start()
        yield tokens([70, 71], finish=99)

    stack.scheduler.script = script
    response = await stack.client.post(path, json=BODIES[path])
    assert response.status_code == 501, response.text
    assert "finish reason 99" in response.text


@pytest.mark.parametrize(
    ("error", "labels"),
    [
        (ModelFault("no logits"), ("error", "model_error", "server_error", "500")),
        (DeadlineExceeded("too slow"), ("error", "timeout_error", "timeout", "504")),
        (InternalError("a bug"), ("error", "internal_error", "server_error", "500")),
    ],
)
@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("path", BODIES)
@pytest.mark.rotates(1)
async def test_errors_after_the_first_token(
    stack: Stack, path: str, streams: bool, error: SurestepError, labels: tuple[str, ...]
) -> None:
    """For HTTP a stream's has status 200; here it has its own."""
    stack.scheduler.script = failing(error, after=[70, 71])
    response = await stack.client.post(path, json=BODIES[path] | {"stream": streams})
    assert (response.status_code == 200) == streams
    assert await ended(stack) == {Labels(path, NAMES[streams], *labels): 1}


@pytest.mark.parametrize("path", BODIES)
async def test_errors_before_the_first_token(stack: Stack, path: str) -> None:
    """They have a status of their own, asked for a stream or not."""
    stack.scheduler.script = failing(QueueFull("full"))
    for streams in (False, True):
        response = await stack.client.post(path, json=BODIES[path] | {"stream": streams})
        assert response.status_code == 429
    hot: dict[str, Any] = {"temperature": 9}
    wrong = {"sampling_params": hot} if "sampling_params" in BODIES[path] else hot
    response = await stack.client.post(path, json=BODIES[path] | wrong)
    assert response.status_code == 400
    await stack.client.get(path)  # no answer was asked for
    assert await ended(stack) == {
        Labels(path, "false", "error", "rate_limit_error", "rate_limit_exceeded", "429"): 2,
        Labels(path, "false", "error", "invalid_request_error", "invalid_value", "400"): 1,
    }


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("path", BODIES)
async def test_clients_that_leave(stack: Stack, path: str, streams: bool) -> None:
    paused = Paused(1)
    stack.scheduler.script = paused
    body = BODIES[path] | {"stream": streams}
    async with asyncio.TaskGroup() as group:
        asking = group.create_task(_begin(stack, path, body))
        await paused.sent.wait()
        if streams:
            await asyncio.wait([asking])  # its first token is there
        asking.cancel()
    gone = ("client_gone", "cancelled_error", "cancelled", "499")
    await until_ended(stack, Labels(path, NAMES[streams], *gone))
    assert sum((await ended(stack)).values()) == 1


async def test_clients_that_are_gone_before_their_request_is_read(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is prepared for them, and no scheduler hears of them."""

    def never(*_: object) -> None:
        raise AssertionError("a request without a client is prepared")

    monkeypatch.setattr(type(stack.server.gateway.text), "at_once", never)
    host, _, port = stack.server.address.rpartition(":")
    body = json.dumps(BODIES["/v1/completions"]).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    for _ in range(_GONE):  # on this thread, while the gateway has no turn
        with socket.create_connection((host, int(port))) as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            client.sendall(b"%sContent-Length: %d\r\n\r\n%s" % (head, len(body), body))
    gone = Labels("/v1/completions", "false", "client_gone", "cancelled_error", "cancelled", "499")
    async with asyncio.timeout(15):
        while sum((await ended(stack)).values()) < _GONE:
            await asyncio.sleep(0.02)
    assert await ended(stack) == {gone: _GONE}
    assert stack.scheduler.requests == []


async def _begin(stack: Stack, path: str, body: dict[str, Any]) -> None:
    """Read the beginning of an answer, then leave."""
    async with stack.client.stream("POST", path, json=body) as response:
        async for _ in response.aiter_bytes():
            return


async def test_a_stream_that_the_end_of_the_server_cuts(start_stack: StartStack) -> None:
    stack = await start_stack(drain_timeout_s=0)
    stack.scheduler.script = Paused(1)
    async with stack.begun("/v1/completions", **BODIES["/v1/completions"]) as rest:
        await stack.server.gateway.admission.drain()
        assert "error" in (await rest())[-1]
    cut = ("error", "service_unavailable_error", "service_unavailable", "503")
    assert await ended(stack) == {Labels("/v1/completions", "true", *cut): 1}


async def test_a_fault_of_ours(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its answer is the framework's, and it counts all the same."""

    def broken(*_: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(type(stack.server.gateway.pool), "pick", broken)
    response = await stack.complete()
    assert response.status_code == 500
    fault = ("error", "internal_error", "server_error", "500")
    assert await ended(stack) == {Labels("/v1/completions", "false", *fault): 1}
    text = (await stack.client.get("/metrics")).text
    assert 'surestep:http_responses_total{status="500"} 1.0' in text


async def test_what_alerts_look_for_is_there_before_it_happens(stack: Stack) -> None:
    text = (await stack.client.get("/metrics")).text
    streaming_ones = await streaming(stack)
    for path in await counted(stack):
        assert f'code="timeout",end="error",path="{path}",status="504",streamed="false"' in text
        streamed = f'code="timeout",end="error",path="{path}",status="504",streamed="true"'
        assert (streamed in text) == (path in streaming_ones)


async def _three_of_four(request: GenerateRequest) -> AsyncIterator[GenerateChunk]:
    """Streams of more than one token end in an error."""
    yield start()
    if request.max_tokens == 1:
        yield tokens([70], finish=2)
        return
    yield tokens([70])
    raise ModelFault("no logits")


async def test_the_last_minute_as_clients_saw_it(start_stack: StartStack) -> None:
    """Health is that of the process; the page and `surestep status` say what clients see."""
    stack = await start_stack()
    stack.scheduler.script = _three_of_four
    for most in (1, 2, 3, 4):
        await stack.stream("/v1/completions", prompt="hello", max_tokens=most)
    stack.scheduler.script = failing(QueueFull("full"))
    await stack.complete()
    seen = (await stack.client.get("/overview")).json()["clients"]
    minute = {"answers": 4, "client_gone": 0, "failed": {"server_error": 3}}
    minute |= {"failed_in_streams": 3, "refused": 1}
    assert {name: seen[name] for name in minute} == minute
    assert (sum(seen["history_failed"]), sum(seen["history_refused"])) == (3, 1)
    for name in ("first_token", "queue"):
        assert 0 < seen[name]["p50_s"] <= seen[name]["p95_s"] < 10
        assert max(filter(None, seen[name]["history_p95_s"])) > 0
    assert seen["inter_token"]["p50_s"] is None
    lengths = {len(seen["age_s"]), len(seen["history_failed"])}
    assert lengths == {len(seen["first_token"]["history_p95_s"])}
    assert (await stack.client.get("/status")).json()["answers"] == minute
    assert (await stack.client.get("/health")).status_code == 200
