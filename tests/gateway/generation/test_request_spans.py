"""Spans of requests at the gateway, received by a real OTLP service."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import pytest
from support.fakes.scheduler import emulated, failing, running, start, tokens
from support.processes.gateway import gateway, until_ready
from support.processes.gateway_stack import Stack, StartStack
from support.processes.ports import free_port
from support.processes.trace_collector import Collector, Sent, collecting, collecting_http
from surestep_common.errors import InternalError, QueueFull
from surestep_proto.scheduler_pb2 import LENGTH, GenerateChunk, GenerateRequest

GENERATE = "surestep.v1.Scheduler/Generate"
TRACE, CALLER = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
PARENT = f"00-{TRACE}-{CALLER}-01"


@pytest.fixture
def collector() -> Iterator[Collector]:
    with collecting() as running:
        yield running


async def closed(stack: Stack) -> None:
    """The tracer has sent what it had."""
    await stack.server.gateway.tracer.close()


def one(collector: Collector, name: str) -> Sent:
    (span,) = collector.named(name)
    return span


async def test_a_request_joins_the_trace_of_its_caller(
    start_stack: StartStack, collector: Collector
) -> None:
    stack = await start_stack(otlp_traces_endpoint=collector.endpoint)
    body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4, "n": 2}
    headers = {"traceparent": PARENT, "tracestate": "vendor=1"}
    reply = await stack.client.post("/v1/chat/completions", json=body, headers=headers)
    assert reply.status_code == 200
    await stack.client.get("/v1/models")  # over at once: nobody needs a trace of it
    await closed(stack)
    assert len(collector.spans) == 3
    request = one(collector, "POST /v1/chat/completions")
    assert (request.trace_id, request.parent_id) == (TRACE, CALLER)
    assert request.service == "surestep-gateway"
    wanted = {
        "http.response.status_code": 200,
        "gen_ai.operation.name": "chat",
        "gen_ai.request.model": "tiny",
        "gen_ai.request.choice.count": 2,
        "gen_ai.usage.input_tokens": reply.json()["usage"]["prompt_tokens"],
        "gen_ai.usage.output_tokens": 8,
        "gen_ai.usage.completion_tokens": 8,
        "gen_ai.response.finish_reasons": ["length", "length"],
        "gen_ai.response.id": reply.json()["id"],
    }
    assert wanted.items() <= request.attributes.items()
    assert request.attributes["gen_ai.latency.time_to_first_token"] > 0
    calls = collector.named(GENERATE)
    assert {(call.trace_id, call.parent_id) for call in calls} == {(TRACE, request.span_id)}
    passed_on = {metadata["traceparent"] for metadata in stack.scheduler.metadata}
    assert passed_on == {f"00-{TRACE}-{call.span_id}-01" for call in calls}
    assert {metadata["tracestate"] for metadata in stack.scheduler.metadata} == {"vendor=1"}


@pytest.mark.usefixtures("never_resumes")
async def test_embeddings_and_errors_of_the_server(
    start_stack: StartStack, collector: Collector
) -> None:
    stack = await start_stack(otlp_traces_endpoint=collector.endpoint)
    reply = await stack.client.post("/v1/embeddings", json={"input": ["a", "b"]})
    assert reply.status_code == 200
    stack.scheduler.script = failing(QueueFull("full", retry_after=1.0))
    assert (await stack.complete(max_tokens=3)).status_code == 429
    stack.scheduler.script = failing(InternalError("broken"), after=[7])
    events = await stack.stream("/v1/completions", prompt="hello", max_tokens=3)
    assert not events.done
    await closed(stack)
    embeddings = one(collector, "POST /v1/embeddings")
    assert embeddings.attributes["gen_ai.operation.name"] == "embeddings"
    refused, broken = collector.named("POST /v1/completions")
    assert (refused.failed, refused.attributes["http.response.status_code"]) == (False, 429)
    assert (broken.failed, broken.attributes["http.response.status_code"]) == (True, 200)
    calls = [call for call in collector.named(GENERATE) if call.failed]
    assert {call.parent_id for call in calls} == {refused.span_id, broken.span_id}


async def test_what_goes_on_elsewhere_is_linked_to_what_was_lost(
    start_stack: StartStack, collector: Collector
) -> None:
    stack = await start_stack(replicas=2, otlp_traces_endpoint=collector.endpoint)
    go = asyncio.Event()

    async def script(request: GenerateRequest) -> AsyncIterator[GenerateChunk]:
        yield start()
        yield tokens([5])
        async with asyncio.timeout(30):
            await go.wait()
        yield tokens(emulated(request)[1:], finish=LENGTH)

    for scheduler in stack.schedulers:
        scheduler.script = script
    answer = asyncio.ensure_future(stack.complete(max_tokens=4))
    async with asyncio.timeout(10):
        while not any(scheduler.num_open for scheduler in stack.schedulers):
            await asyncio.sleep(0.005)
    (victim,) = [scheduler for scheduler in stack.schedulers if scheduler.num_open]
    await victim.stop()
    go.set()
    assert (await answer).status_code == 200
    await closed(stack)
    request = one(collector, "POST /v1/completions")
    lost, resumed = collector.named(GENERATE)
    assert (lost.failed, lost.links) == (True, [])
    assert (resumed.failed, resumed.links) == (False, [lost.span_id])
    assert lost.parent_id == resumed.parent_id == request.span_id
    assert (request.failed, request.attributes["surestep.resumes"]) == (False, 1)


async def test_spans_over_http_with_a_key(
    start_stack: StartStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/protobuf")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "api-key=secret")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "mine")
    with collecting_http() as collector:
        stack = await start_stack(otlp_traces_endpoint=collector.endpoint)
        assert (await stack.complete(max_tokens=2)).status_code == 200
        await closed(stack)
    assert set(collector.paths) == {"/v1/traces"}
    assert {headers["api-key"] for headers in collector.headers} == {"secret"}
    assert one(collector, "POST /v1/completions").service == "mine"


async def test_samplers_decide_and_ask_the_caller(
    start_stack: StartStack, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_always_off")
    stack = await start_stack(otlp_traces_endpoint=collector.endpoint)
    assert (await stack.complete(max_tokens=2)).status_code == 200
    body, headers = {"prompt": "hello", "max_tokens": 2}, {"traceparent": PARENT}
    reply = await stack.client.post("/v1/completions", json=body, headers=headers)
    assert reply.status_code == 200
    await closed(stack)
    assert {span.trace_id for span in collector.spans} == {TRACE}
    told = [metadata["traceparent"] for metadata in stack.scheduler.metadata]
    assert [int(one[-2:], 16) & 1 for one in told] == [0, 1]


async def test_a_collector_that_hangs_delays_neither_requests_nor_the_end(model: Path) -> None:
    port = free_port()
    with socket.create_server(("127.0.0.1", 0)) as hangs:  # who connects waits for ever
        endpoint = f"http://127.0.0.1:{hangs.getsockname()[1]}"
        async with (
            running() as scheduler,
            gateway(model, port, scheduler.port, f"--otlp-traces-endpoint={endpoint}") as process,
            httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=20) as client,
        ):
            await until_ready(client, process)
            body = {"prompt": "hello", "max_tokens": 2}
            for _ in range(50):
                assert (await client.post("/v1/completions", json=body)).status_code == 200
            process.terminate()
            async with asyncio.timeout(10):  # the deadline of an export alone is as long
                assert await process.wait() == 0


async def test_a_collector_that_is_away_costs_nothing(start_stack: StartStack) -> None:
    stack = await start_stack(otlp_traces_endpoint=f"127.0.0.1:{free_port()}")
    for _ in range(20):
        assert (await stack.complete(max_tokens=2)).status_code == 200
    began = time.monotonic()
    await closed(stack)
    assert time.monotonic() - began < 10


MANY = ",".join(f"k{i}=" + "v" * 250 for i in range(32))


@pytest.mark.parametrize("state", ["a=" + "x" * 30_000, MANY, "=,;="], ids=["long", "many", "odd"])
@pytest.mark.rotates(1)
async def test_headers_of_clients_break_no_call(
    start_stack: StartStack, collector: Collector, state: str
) -> None:
    stack = await start_stack(otlp_traces_endpoint=collector.endpoint)
    for parent in (PARENT, "00-0-0-0", "x" * 1000):
        headers = {"traceparent": parent, "tracestate": state}
        body = {"prompt": "hello", "max_tokens": 2}
        reply = await stack.client.post("/v1/completions", json=body, headers=headers)
        assert reply.status_code in (200, 400), reply.text  # 400: no header at all
    assert (await stack.complete(max_tokens=2)).status_code == 200
