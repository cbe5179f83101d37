"""One trace of a request through all processes of a server that loses its worker in the middle."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import httpx
import pytest
from support.faults.server import PACED
from support.processes.stack import serve
from support.processes.trace_collector import collecting

pytestmark = pytest.mark.timeout(300)

GENERATE = "surestep.v1.Scheduler/Generate"
TRACE, CALLER = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


def test_one_trace_from_http_to_the_replay(tiny_model: Path, tmp_path: Path) -> None:
    headers = {"traceparent": f"00-{TRACE}-{CALLER}-01"}
    body = {"model": "tiny", "prompt": "hello", "max_tokens": 480, "stream": True}
    body |= {"ignore_eos": True}
    with collecting() as collector:
        limits = ("--max-num-seqs", "4", "--kv-cache-memory", "0.05")
        flags = (*limits, "--otlp-traces-endpoint", collector.endpoint)
        with serve(tiny_model, tmp_path, *flags, variables=PACED) as one:
            pid, num_events = one.status()["scheduler"]["ranks"][0]["pid"], 0
            url = f"{one.url}/v1/completions"
            with httpx.stream("POST", url, json=body, headers=headers, timeout=90) as reply:
                for line in reply.iter_lines():
                    num_events += line.startswith("data: {")
                    if num_events == 2:
                        os.kill(pid, signal.SIGKILL)
                        num_events += 1
            assert line == "" or line == "data: [DONE]"
        collector.until(lambda c: len(c.named("decode")) == 2)
    (request,) = collector.named("POST /v1/completions")
    outer, inner = collector.named(GENERATE)
    assert {span.trace_id for span in collector.spans} == {TRACE}
    chain = [request.parent_id, outer.parent_id, inner.parent_id]
    assert chain == [CALLER, request.span_id, outer.span_id]
    assert [s.service for s in (request, outer, inner)] == [
        *("surestep-gateway", "surestep-gateway", "surestep-scheduler"),
    ]
    lost, replayed = collector.named("decode")
    assert (lost.failed, replayed.failed, replayed.links) == (True, False, [lost.span_id])
    assert request.attributes["gen_ai.usage.output_tokens"] == 480
    assert json.loads(json.dumps(request.attributes))["gen_ai.request.model"] == "tiny"
