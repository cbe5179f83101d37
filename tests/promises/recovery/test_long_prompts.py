"""Sixteen long prompts and a dead rank: what was computed of them is not computed again."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.checkpoints.tiny import make_tiny_checkpoint
from support.faults.run import client_of, run
from support.faults.server import PACED
from support.faults.streams import KINDS, STREAMS, Answer, Ask, Tally, ask, differences, stream
from support.processes.stack import Stack, serve

pytestmark = pytest.mark.timeout(300)
BLOCK, DRAFTS = 16, 4
TOKENS = 600  # of an answer: seconds, by which clients on a busy machine may lag behind
FLAGS = (
    *("--dtype", "float32", "--served-model-name", "tiny", "--kv-cache-memory", "0.3"),
    *("--max-num-seqs", "24", "--max-num-batched-tokens", "512", "--block-size", f"{BLOCK}"),
)
SPECULATION = f'{{"method": "ngram", "num_speculative_tokens": {DRAFTS}, "prompt_lookup_min": 1}}'


@pytest.fixture(
    scope="module",
    params=[("none", 1), (SPECULATION, 1), (SPECULATION, 2)],
    ids=["plain", "drafts", "two ranks"],
)
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Stack]:
    folder: Path = tmp_path_factory.mktemp("long")
    model = make_tiny_checkpoint(folder / "m", seed=7, tokenizer=True, max_position=4096)
    speculation, ranks = request.param
    drafts = "--speculative-config", speculation, "--no-adaptive-draft-length"
    several = "--tensor-parallel-size", f"{ranks}"
    with serve(model, folder / "logs", *FLAGS, *drafts, *several, variables=PACED) as running:
        yield running


@pytest.fixture
def asks() -> list[Ask]:
    rng = random.Random(11)
    return [ask("seeded", KINDS["seeded"], rng, 400, TOKENS) for _ in range(STREAMS)]


async def killed(stack: Stack, pid: int, asks: list[Ask]) -> list[Answer]:
    """Answers of streams whose rank, which has this pid, is killed when all of them decode."""
    answers = [Answer.of(each) for each in asks]
    async with client_of(stack.url) as client, asyncio.TaskGroup() as tasks:
        for each, answer in zip(asks, answers, strict=True):
            tasks.create_task(stream(client, each, Tally(), answer))
        while not all(answer.choices[0].token_ids for answer in answers):
            await asyncio.sleep(0.01)
        os.kill(pid, signal.SIGKILL)
    return answers


@pytest.mark.rotates(1)
def test_a_kill_costs_no_prompt(server: Stack, asks: list[Ask]) -> None:
    quiet = asyncio.run(run(server.url, asks))
    pid = server.scheduler()["ranks"][0]["pid"]
    answers = asyncio.run(killed(server, pid, asks))
    assert differences(quiet, answers) == []
    assert server.scheduler()["ranks"][0]["pid"] != pid
    (incident,) = server.scheduler()["incidents"]
    again = int(incident["num_replayed_tokens"]) - int(incident["num_kept_tokens"])
    assert int(incident["num_replayed_tokens"]) > 10_000
    assert again <= STREAMS * (BLOCK + DRAFTS + 1)
