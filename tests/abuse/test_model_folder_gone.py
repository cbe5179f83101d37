"""The model folder goes away, or holds another model: whoever was served goes on being served."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from abuse_server import Abused, abused, until
from fault_streams import Tally
from tiny import make_tiny_checkpoint

pytestmark = pytest.mark.timeout(240)


@pytest.fixture(params=[1, 2], ids=["1-rank", "2-ranks"])
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Abused]:
    ranks = str(request.param)
    with abused(tmp_path, "--tensor-parallel-size", ranks, max_tokens=400) as running:
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
            await tally.reached(tally.tokens + 20)
        make_tiny_checkpoint(server.model, "llama", seed=8, tokenizer=True)  # another model
        for _ in range(4):  # before it is ready: three times in a row it is distrusted
            await kill(server, ranks - 1)
        await ready(server)
        await tally.reached(tally.tokens + 20)

    before = server.supervisors()[ranks - 1]["restarts"]
    server.survive(disturb, longest_s=180)
    after = server.supervisors()[ranks - 1]
    assert after["restarts"] >= before + 5
    assert after["held_weight_bytes"] > 0
    log = (server.server.stack.logs / f"worker{ranks - 1}.log").read_text()
    assert "holds another model now" in log or "before it was ready" in log
