"""Clients that ask for all there is, and what others get meanwhile: a server as a user starts it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from support.checkpoints.tiny import make_tiny_checkpoint
from support.faults.server import FaultyServer, serve_for_faults

pytestmark = [pytest.mark.timeout(180), pytest.mark.rotates(3, turn=1)]
SLOTS, BUDGET, QUEUE = 8, 64, 40
NGRAM = '{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1}'
# A short prompt waits for 3 steps, the gateway and the client for a core. Without fair shares it is
# hundreds of steps, or a refusal. The exact bound is that of tests/scheduler/policy/test_fair_policy.py.
STEPS = 100

PATIENCE_S = 4.0  # for an answer to /health, on a machine that others use too

Body = dict[str, Any]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultyServer]:
    """Few slots, small steps, a short queue, drafts."""
    folder = tmp_path_factory.mktemp("greedy")
    model = make_tiny_checkpoint(
        folder / "tiny", "llama", seed=7, tokenizer=True, max_position=2048
    )
    flags = (
        *("--max-num-seqs", str(SLOTS), "--max-num-batched-tokens", str(BUDGET)),
        *("--max-queue-len", str(QUEUE), "--max-queue-tokens", "12000"),
        *("--speculative-config", NGRAM, "--kv-cache-memory", "0.1"),
    )
    with serve_for_faults(model, folder, *flags) as running:
        yield running


def prompt(number: int, length: int) -> list[int]:
    return [3 + (number * 7 + i * i) % 370 for i in range(length)]


def long_prompts(number: int) -> Body:
    return {"prompt": prompt(number, 900), "max_tokens": 30}


def long_answers(number: int) -> Body:
    return {"prompt": prompt(number, 5), "max_tokens": 1500}


def siblings(number: int) -> Body:
    return {"prompt": prompt(number, 100), "max_tokens": 200, "n": 16}


def high_priorities(number: int) -> Body:
    return {"prompt": prompt(number, 400), "max_tokens": 200, "priority": -10}


async def post(client: httpx.AsyncClient, body: Body) -> httpx.Response:
    defaults: Body = {"temperature": 0.0, "ignore_eos": True}
    return await client.post("/v1/completions", json=defaults | body)


async def metric(client: httpx.AsyncClient, name: str) -> float:
    text = (await client.get("/metrics")).text
    lines = [line for line in text.splitlines() if line.startswith(name + "{")]
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


async def steps_of(client: httpx.AsyncClient, number: int) -> float:
    """Return the steps of the server while it answers a short prompt."""
    before = await metric(client, "surestep:steps_total")
    response = await post(client, {"prompt": prompt(number, 3), "max_tokens": 1, "user": "modest"})
    assert response.status_code == 200, response.text
    return await metric(client, "surestep:steps_total") - before


async def insist(client: httpx.AsyncClient, body: Body) -> None:
    """Send it again and again, whatever comes back."""
    while True:
        response = await post(client, body | {"user": "greedy"})
        assert response.status_code in (200, 429), response.text
        await asyncio.sleep(0.2 * (response.status_code == 429))


@pytest.mark.parametrize("habit", [long_prompts, long_answers, siblings, high_priorities])
async def test_a_short_prompt_of_another_client_is_served_at_once(
    server: FaultyServer, habit: Callable[[int], Body]
) -> None:
    """Although 40 clients of one user fill slots and queue, for all the steps there are."""
    async with httpx.AsyncClient(base_url=server.stack.url, timeout=120) as client:
        async with asyncio.TaskGroup() as tasks:
            greedy = [tasks.create_task(insist(client, habit(number))) for number in range(40)]
            while await metric(client, "vllm:num_requests_waiting") < QUEUE // 4:
                await asyncio.sleep(0.05)
            waits = [await steps_of(client, number) for number in range(5)]
            # The gateway may still have been busy with the first calls of so many clients.
            assert max(waits[1:]) < STEPS, waits
            assert await metric(client, "surestep:tenants") == 1
            for one in greedy:
                one.cancel()
        while await metric(client, "surestep:slots_used"):
            await asyncio.sleep(0.05)


async def scheduler_pid(client: httpx.AsyncClient) -> int:
    status = (await client.get("/status")).json()
    pid: int = status["schedulers"][0]["status"]["pid"]
    return pid


async def test_the_request_that_ended_schedulers_is_refused(server: FaultyServer) -> None:
    """128 sequences, each with a megabyte of words in characters of four bytes."""
    words = ["".join(chr(0x1D100 + (i + j) % 200) for j in range(256)) for i in range(1024)]
    async with httpx.AsyncClient(base_url=server.stack.url, timeout=60) as client:
        pid = await scheduler_pid(client)
        body = {"prompt": prompt(1, 5), "max_tokens": 2, "n": 128, "bad_words": words}
        for _ in range(3):
            response = await post(client, body)
            assert response.status_code == 400
            assert response.json()["error"]["param"] == "bad_words"
        assert await scheduler_pid(client) == pid
        assert (await client.get("/health/ready")).status_code == 200


async def test_the_worst_that_is_admitted_keeps_nobody_waiting(server: FaultyServer) -> None:
    """A stream goes on, the gateway answers, and nobody takes the scheduler for hung."""
    words = [f"{i:04}{'xyz' * 5}"[:15] for i in range(240)]
    worst = {"prompt": prompt(2, 5), "max_tokens": 2, "n": 128, "bad_words": words}
    biases = {str(i): 1.0 for i in range(300)}
    async with (
        httpx.AsyncClient(base_url=server.stack.url, timeout=120) as client,
        asyncio.TaskGroup() as tasks,
    ):
        pid = await scheduler_pid(client)
        stream = tasks.create_task(post(client, long_answers(3) | {"max_tokens": 200, "user": "b"}))
        heavy = [
            tasks.create_task(post(client, worst)),
            tasks.create_task(post(client, {**worst, "bad_words": None, "logit_bias": biases})),
        ]
        longest = 0.0
        while not all(task.done() for task in (stream, *heavy)):
            began = time.monotonic()
            assert (await client.get("/health")).status_code == 200
            longest = max(longest, time.monotonic() - began)
            await asyncio.sleep(0.02)
        assert [task.result().status_code for task in (stream, *heavy)] == [200, 200, 200]
        assert longest < PATIENCE_S
        assert await scheduler_pid(client) == pid


async def test_more_siblings_than_the_queue_has_room_for(server: FaultyServer) -> None:
    """On an idle server all of them are served."""
    body = {"prompt": prompt(5, 1900), "max_tokens": 3, "n": 128}
    async with httpx.AsyncClient(base_url=server.stack.url, timeout=150) as client:
        response = await post(client, body)
    assert response.status_code == 200, response.text
    assert [choice["finish_reason"] for choice in response.json()["choices"]] == ["length"] * 128
