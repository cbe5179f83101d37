"""A thousand slow, silent and rude clients at once: honest ones are served, nothing stays held."""

from __future__ import annotations

import asyncio
import itertools
import os
import time
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from slow_clients import OTHERS, READERS, be, silent
from support.fakes.scheduler import FakeScheduler, emulating, running, start, tokens
from support.processes.gateway import Process, gateway, until_ready
from support.processes.ports import free_port
from surestep_proto.scheduler_pb2 import GenerateChunk, GenerateRequest

pytestmark = pytest.mark.rotates(2, turn=0)

NUM_CLIENTS = 1000
HONEST = 4
LONGEST_S = 20  # for an honest answer; half a second where nothing else runs on the machine
FLAGS = (
    *("--body-timeout-s", "6", "--send-timeout-s", "4"),
    *("--max-total-body-bytes", "10000000"),
    *("--timeout-keep-alive", "5"),  # so that those without a request are gone within the test
)


async def script(request: GenerateRequest) -> AsyncIterator[GenerateChunk]:
    """Those who never read get text without an end, as fast as they take it."""
    if request.max_tokens < 200:
        async for chunk in emulating(request):
            yield chunk
        return
    yield start()
    while True:
        yield tokens([70] * 40, logprobs=True)
        await asyncio.sleep(0.05)


async def honest(client: httpx.AsyncClient, done: asyncio.Event) -> list[float]:
    """Ask until it is over; how long the answers took, in seconds."""
    took = []
    body = {"prompt": "hello " * 20, "max_tokens": 5}
    while not done.is_set():
        began = time.monotonic()
        response = await client.post("/v1/completions", json=body)
        took.append(time.monotonic() - began)
        assert response.status_code == 200, response.text
        await asyncio.sleep(0.02)
    return took


def num_files(process: Process) -> int:
    return len(os.listdir(f"/proc/{process.pid}/fd"))


async def settled(
    client: httpx.AsyncClient, process: Process, files: int, fake: FakeScheduler
) -> None:
    """Nothing is open any more, on either side."""
    async with asyncio.timeout(30):
        while (await client.get("/load")).json()["server_load"] or fake.num_open:
            await asyncio.sleep(0.05)
        while num_files(process) > files:
            await asyncio.sleep(0.05)


@pytest.mark.timeout(180)
async def test_a_thousand_of_them_at_once(model: Path) -> None:
    port = free_port()
    async with (
        running(script=script) as scheduler,
        gateway(model, port, scheduler.port, *FLAGS) as process,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=30) as client,
    ):
        assert process.stderr is not None
        await until_ready(client, process)
        done = asyncio.Event()
        async with asyncio.TaskGroup() as group, asyncio.timeout(120):
            log = group.create_task(process.stderr.read())
            warm = await client.post("/v1/completions", json={"prompt": "x", "max_tokens": 5})
            assert warm.status_code == 200
            files = num_files(process) + HONEST
            lucky = [group.create_task(honest(client, done)) for _ in range(HONEST)]
            every = (*READERS, *OTHERS)
            kinds = [every[i % len(every)] for i in range(NUM_CLIENTS)]
            tasks = [group.create_task(be(kind, ("127.0.0.1", port))) for kind in kinds]
            told = [(k, t) for k, t in zip(kinds, tasks, strict=True) if k in READERS]
            await asyncio.wait([task for _, task in told])
            done.set()
            took = sorted(itertools.chain.from_iterable([await task for task in lucky]))
            await settled(client, process, files, scheduler)
            metrics = (await client.get("/metrics")).text
            process.terminate()
            for task in tasks:
                task.cancel()
        said = Counter((kind.__name__, task.result()) for kind, task in told)
        assert len(took) >= HONEST, took
        assert took[-1] < LONGEST_S, took[-10:]
        for kind in ("body_never", "body_in_drops", "chunks_in_drops", "half_a_body"):
            answers = {line for name, line in said if name == kind}
            assert answers <= {
                "HTTP/1.1 408 Request Timeout",
                "HTTP/1.1 503 Service Unavailable",
            }, said
        assert ("body_in_drops", "HTTP/1.1 408 Request Timeout") in said
        assert said["silent", ""] == sum(kind is silent for kind in kinds)
        assert 'surestep:connections_given_up_total{reason="head"} 0.0' not in metrics
        assert b"Traceback" not in log.result()
