"""A cache in which hardly anything fits: requests push each other out and lose no token by it."""

from __future__ import annotations

import itertools
import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.faults.deprived_server import SEED, Abused, abused, until
from support.faults.streams import KINDS, Tally, ask

pytestmark = [pytest.mark.timeout(240), pytest.mark.rotates(3, turn=0)]
STREAMS, CHOICES, TOKENS = 16, 4, 70
BLOCK_SIZE, BLOCKS = 8, 40
BLOCK_BYTES = 4 << 10  # of the tiny model
MIXED = itertools.cycle(("greedy", "seeded", "logprobs", "penalties"))
ASKS = [
    ask(kind, {**KINDS[kind], "n": CHOICES}, random.Random(f"{SEED}-{number}"), 6, TOKENS)
    for number, kind in zip(range(STREAMS), MIXED, strict=False)
]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Abused]:
    quick = {"FAULT_PACE_S": "0"}
    with abused(tmp_path / "large", asks=ASKS, variables=quick) as roomy:
        expected = roomy.expected
    size = str(BLOCKS * 8 / (1 << 20))
    with abused(
        tmp_path / "small", "--kv-cache-memory", size, asks=ASKS, expected=expected
    ) as small:
        yield small


def test_ids_are_those_of_a_large_cache(server: Abused) -> None:
    async def disturb(tally: Tally) -> None:
        for _ in range(2):
            await tally.reached(tally.tokens + 100)
            await until(server.server.stack.is_ready, "readiness")
            os.kill(server.supervisors()[0]["rank_pid"], signal.SIGKILL)

    server.survive(disturb, longest_s=120)
    assert server.server.stack.metric("vllm:num_preemptions_total") > 5
