"""Spans of requests in the scheduler, across the loss of its workers."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from support.fakes.model import FakeModel
from support.fakes.worker import FakeSupervisor, FakeWorker
from support.processes.scheduler_harness import (
    Gate,
    expected,
    make_request,
    make_settings,
    scheduler,
)
from support.processes.trace_collector import Collector, Sent, collecting
from surestep_proto import supervisor_pb2

MODEL = FakeModel()
GENERATE = "surestep.v1.Scheduler/Generate"
TRACE, CALLER = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
PARENT = (("traceparent", f"00-{TRACE}-{CALLER}-01"),)


@pytest.fixture
def collector() -> Iterator[Collector]:
    with collecting() as running:
        yield running


def parts(collector: Collector, whole: Sent) -> list[Sent]:
    """Spans inside another, in their order."""
    found = [span for span in collector.spans if span.parent_id == whole.span_id]
    return sorted(found, key=lambda span: (span.attributes["surestep.attempt"], span.began_ns))


async def test_a_replay_is_linked_to_the_attempt_that_was_lost(collector: Collector) -> None:
    gate = Gate(epoch=1, steps=12)
    supervisor = FakeSupervisor(lambda: FakeWorker(MODEL, before_step=gate))
    message = make_request(1, 5, 60, stop_token_ids=[])
    async with supervisor as address:
        settings = make_settings(
            [], supervisor_addresses=[address], otlp_traces_endpoint=collector.endpoint
        )
        async with scheduler(settings) as client:
            call = client.stub.Generate(message, metadata=PARENT)
            chunks = asyncio.ensure_future(_all(call))
            await gate.reached.wait()
            await supervisor.lose(supervisor_pb2.KILLED, supervisor_pb2.FORWARD, "signal 9")
            tokens = await chunks
    assert tokens == expected(MODEL, message)
    (whole,) = collector.named(GENERATE)
    assert (whole.trace_id, whole.parent_id, whole.failed) == (TRACE, CALLER, False)
    assert whole.service == "surestep-scheduler"
    assert whole.attributes["gen_ai.usage.output_tokens"] == 60
    assert whole.attributes["surestep.replays"] == 1
    spans = parts(collector, whole)
    assert [span.name for span in spans] == ["queue", "prefill", "decode"] * 2
    lost, replay = spans[:3], spans[3:]
    assert [span.failed for span in spans] == [False, False, True, False, False, False]
    assert all(span.links == [] for span in lost)
    assert all(span.links == [lost[-1].span_id] for span in replay)
    ends = [span.ended_ns for span in spans]
    begins = [span.began_ns for span in spans]
    assert all(abs(end - begin) < 1000 for end, begin in zip(ends, begins[1:], strict=False))
    assert whole.began_ns - 5_000_000 <= begins[0]
    assert ends[-1] <= whole.ended_ns + 5_000_000


async def test_who_leaves_or_is_refused_has_a_trace(collector: Collector) -> None:
    gate = Gate(epoch=1, steps=6)
    worker = FakeWorker(MODEL, before_step=gate)
    address = await worker.start()
    try:
        settings = make_settings([address], otlp_traces_endpoint=collector.endpoint)
        async with scheduler(settings) as client:
            call = client.stub.Generate(make_request(1, 5, 60, stop_token_ids=[]))
            await gate.reached.wait()
            call.cancel()
            gate.opened.set()
            await client.idle()
            refused = client.stub.Generate(make_request(2, 0))
            with pytest.raises(Exception, match="prompt"):
                await _all(refused)
    finally:
        await worker.stop()
    first, second = collector.named(GENERATE)
    assert [first.failed, second.failed] == [False, False]  # nothing of it is the server's fault
    assert [span.name for span in parts(collector, first)][:2] == ["queue", "prefill"]
    assert parts(collector, second) == []


async def _all(call: object) -> list[int]:
    return [token async for chunk in call for token in chunk.token_ids]  # type: ignore[attr-defined]
