"""Ranks that somebody kills, and requests that end them: who is blamed, and who is not."""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import httpx
import pytest
from support.checkpoints.tiny import make_tiny_checkpoint
from support.faults.server import FaultyServer, serve_for_faults

pytestmark = [pytest.mark.timeout(180), pytest.mark.rotates(3, turn=0)]
FATAL, MARK = 383, 382  # tokens that nobody's request may emit
STREAMS = 16


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultyServer]:
    """A forward pass over the token FATAL ends the rank."""
    folder = tmp_path_factory.mktemp("signals")
    model = make_tiny_checkpoint(
        folder / "tiny", "llama", seed=7, tokenizer=True, max_position=1024
    )
    with serve_for_faults(model, folder, variables={"FAULT_FATAL_TOKEN": str(FATAL)}) as running:
        yield running


def complete(server: FaultyServer, seed: int, *extra_ids: int) -> httpx.Response:
    body: dict[str, Any] = {
        "prompt": [*(3 + (seed * 7 + i) % 300 for i in range(12)), *extra_ids],
        "max_tokens": 24,
        "temperature": 0.8,
        "seed": seed,
        "ignore_eos": True,
        "return_token_ids": True,
        "logit_bias": {str(FATAL): -100, str(MARK): -100},
    }
    return httpx.post(server.stack.url + "/v1/completions", json=body, timeout=150)


def ids(response: httpx.Response) -> list[int]:
    assert response.status_code == 200, response.text
    found: list[int] = response.json()["choices"][0]["token_ids"]
    return found


def rank_in_forward(server: FaultyServer, after_epoch: int) -> tuple[int, int]:
    """Pid and epoch of a rank that is within a step of a newer epoch."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        scheduler = server.status()["scheduler"]
        for supervisor in scheduler["supervisors"] if scheduler else ():
            beat = supervisor.get("heartbeat", {})
            if beat.get("phase") == "FORWARD" and int(beat.get("epoch", 0)) > after_epoch:
                return supervisor["rank_pid"], int(beat["epoch"])
        time.sleep(0.01)
    raise AssertionError(server.stack.tail())


def test_signals_at_one_spot_are_nobodys_fault(
    server: FaultyServer, pytestconfig: pytest.Config
) -> None:
    """Each strikes in the stream's first step of an epoch: always at the same positions.

    Steps of others, such as a canary's, are left alone.
    """
    kills = 10 if pytestconfig.getoption("--full") else 5
    quiet = ids(complete(server, 1, MARK))
    epoch = server.facts().epoch - 1
    with ThreadPoolExecutor() as threads:
        server.order("forward", 0, "sleep", s=30, token=MARK)
        answer = threads.submit(complete, server, 1, MARK)
        for number in range(kills):
            server.stack.wait_until(lambda: not server.pending_orders(), "the stream's step")
            pid, epoch = rank_in_forward(server, epoch)
            if number + 1 < kills:
                server.order("forward", 0, "sleep", s=30, token=MARK)
            os.kill(pid, signal.SIGKILL)
        assert ids(answer.result()) == quiet
    assert server.stack.metric("surestep:poisoned_requests_total") == 0
    assert [incident.cause for incident in server.facts().incidents] == ["worker_exit"] * kills


def test_one_among_sixteen_that_ends_the_ranks_fails_alone(server: FaultyServer) -> None:
    epoch = server.facts().epoch
    with ThreadPoolExecutor(STREAMS) as threads:
        quiet = [
            ids(answer) for answer in threads.map(partial(complete, server), range(1, STREAMS))
        ]
        others = [threads.submit(complete, server, seed) for seed in range(1, STREAMS)]
        guilty: Future[httpx.Response] = threads.submit(complete, server, 99, FATAL)
        refused = guilty.result()
        assert [ids(other.result()) for other in others] == quiet
    assert refused.status_code == 500, refused.text
    error = refused.json()["error"]
    assert error["type"] == "model_error"
    assert "this request ended the workers" in error["message"]
    assert server.facts().epoch - epoch <= math.log2(STREAMS) + 4
