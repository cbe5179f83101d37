"""The model folder goes away, or holds another model: whoever was served goes on being served."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator

import httpx
import pytest
from openai import APIError
from support.checkpoints.tiny import make_tiny_checkpoint
from support.faults.deprived_server import Abused, abused, until
from support.faults.run import client_of
from support.faults.streams import Ask, Tally, stream

pytestmark = [pytest.mark.timeout(240), pytest.mark.rotates(3, turn=1)]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Abused]:
    folder = tmp_path_factory.mktemp("folder")
    with abused(folder, "--tensor-parallel-size", "2", num_streams=4, max_tokens=400) as running:
        yield running


async def kill(server: Abused, rank: int) -> None:
    """SIGKILL to a rank, and wait until there is another process."""
    pid = server.supervisors()[rank]["rank_pid"]
    os.kill(pid, signal.SIGKILL)
    await until(lambda: server.supervisors()[rank]["rank_pid"] not in (0, pid), "a new rank")


async def ready(server: Abused) -> None:
    await until(server.server.stack.is_ready, "readiness")


def test_ranks_come_back_without_the_folder(server: Abused) -> None:
    ranks = len(server.supervisors())

    async def disturb(tally: Tally) -> None:
        server.model.rename(server.model.with_name("elsewhere"))
        for rank in range(ranks):
            await kill(server, rank)
            await ready(server)
            await tally.reached(tally.tokens + 10)
        make_tiny_checkpoint(server.model, "llama", seed=8, tokenizer=True)  # another model
        for attempt in range(3):  # before it is ready: three times in a row it is distrusted
            server.server.order("load", ranks - 1, "kill", pid=0)
            if not attempt:
                await kill(server, ranks - 1)
            await until(lambda: not server.server.pending_orders(), "an end while loading")
        await ready(server)
        await tally.reached(tally.tokens + 10)

    before = server.supervisors()[ranks - 1]["restarts"]
    server.survive(disturb, longest_s=180)
    after = server.supervisors()[ranks - 1]
    assert after["restarts"] >= before + 4
    assert after["held_weight_bytes"] > 0
    log = (server.server.stack.logs / f"worker{ranks - 1}.log").read_text()
    assert "holds another model now" in log


def test_nobody_gets_an_answer_in_two_voices(server: Abused) -> None:
    """The folder holds another model by now; a supervisor that is started again without a rank to
    adopt reads it, and the other one's weights are out of date."""
    stack = server.server.stack
    asyncio.run(ready(server))
    endings = asyncio.run(lose_a_supervisor_in_mid_stream(server))
    assert set(endings) == {"model_changed_error"}
    asyncio.run(ready(server))
    body = {**server.asks[0].options, "stream": False}
    body |= body.pop("extra_body")
    answer = httpx.post(f"{stack.url}/v1/completions", json=body, timeout=60)
    assert answer.status_code == 200, "new requests are answered by the new model"
    assert answer.json()["choices"][0]["token_ids"] != server.expected[0].choices[0].token_ids
    assert "serves another model now" in (stack.logs / "gateway.log").read_text()


async def lose_a_supervisor_in_mid_stream(server: Abused) -> list[str]:
    """Types of the errors that all streams ended with."""

    async def ending(ask: Ask, tally: Tally) -> str:
        try:
            await stream(client, ask, tally)
        except APIError as error:
            return str(error.type)
        return "none"

    async with client_of(server.server.stack.url) as client, asyncio.TaskGroup() as tasks:
        tallies = [Tally() for _ in server.asks]
        calls = [
            tasks.create_task(ending(*pair)) for pair in zip(server.asks, tallies, strict=True)
        ]
        for tally in tallies:
            await tally.reached(1)
        lost = server.supervisors()[1]
        os.kill(lost["pid"], signal.SIGKILL)
        os.kill(lost["rank_pid"], signal.SIGKILL)
    return [call.result() for call in calls]
