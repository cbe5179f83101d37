"""A scheduler that dies, stops or is cut off costs seconds and no token."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
from e2e.conftest import FLAGS
from openai.types import Completion
from support.checkpoints.tiny import make_tiny_checkpoint
from support.clients.completions import client_of
from support.faults.server import PACED
from support.processes.stack import Stack, serve

pytestmark = pytest.mark.timeout(180)
MAX_TOKENS = 600
PAUSE_S = 30.0  # a busy machine takes its time to start a process; benchmarks have the figures
RESUMED = "surestep:resumed_requests_total"


@pytest.fixture(scope="module")
def fragile(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """A server of their own for tests that break it; its model has room for long streams."""
    folder = tmp_path_factory.mktemp("scheduler-lost")
    make_tiny_checkpoint(folder / "tiny", "llama", seed=7, tokenizer=True, max_position=4096)
    with serve(folder / "tiny", folder / "logs", *FLAGS, variables=PACED) as running:
        yield running


@pytest.fixture(scope="module")
def quiet(fragile: Stack) -> Answer:
    """Return an answer that nobody has disturbed."""
    answer = stream(fragile)
    assert len(answer.ids) == MAX_TOKENS
    return answer


@pytest.mark.rotates(3, turn=2)
def test_a_new_request_outlasts_the_drain_of_the_only_scheduler(tmp_path: Path) -> None:
    """Streams keep it from its end for as long as they may, and a start takes seconds more."""
    tiny = make_tiny_checkpoint(
        tmp_path / "tiny", "llama", seed=7, tokenizer=True, max_position=32768
    )
    limits = ("--drain-timeout-s", "20", "--admission-timeout-s", "20")
    cache = ("--kv-cache-memory", "0.2", "--max-num-seqs", "8", "--max-num-batched-tokens", "64")
    with (
        serve(tiny, tmp_path / "logs", *cache, *limits) as stack,
        httpx.Client(base_url=stack.url, timeout=120) as client,
    ):
        long: dict[str, Any] = {"prompt": "abc", "max_tokens": 32000, "ignore_eos": True}
        with client.stream("POST", "/v1/completions", json=long | {"n": 8, "stream": True}) as one:
            lines = one.iter_lines()  # the stream is open as long as this is
            next(lines)
            pid = stack.scheduler()["pid"]
            os.kill(pid, signal.SIGTERM)
            stack.wait_until(lambda: not stack.is_ready(), "the drain")
            began = time.monotonic()
            answer = client.post("/v1/completions", json={"prompt": "new", "max_tokens": 4})
            took_s = time.monotonic() - began
        assert answer.status_code == 200, answer.text
        assert stack.scheduler()["pid"] != pid
        assert took_s > 20, "nothing was left to be waited for"


class Answer(NamedTuple):
    """Tokens of a stream, and its longest pause in seconds."""

    ids: list[int]
    pause_s: float


def stream(stack: Stack, number: signal.Signals | None = None) -> Answer:
    """Read a stream; after ten tokens the scheduler gets the signal."""
    client = client_of(stack)
    chunks = client.completions.create(
        model=client.models.list().data[0].id,
        prompt="abcabc abc",
        max_tokens=MAX_TOKENS,
        temperature=0.9,
        seed=29,
        stream=True,
        extra_body={"ignore_eos": True, "return_token_ids": True},
    )
    answer, last = Answer([], 0.0), time.monotonic()
    for chunk in chunks:
        now = time.monotonic()
        answer, last = Answer(answer.ids + ids_of(chunk), max(answer.pause_s, now - last)), now
        if number is not None and len(answer.ids) >= 10:
            os.kill(stack.scheduler()["pid"], number)
            number = None
    assert number is None
    return answer


def ids_of(chunk: Completion) -> list[int]:
    ids: list[int] = []
    for choice in chunk.choices:
        ids += choice.token_ids or []  # type: ignore[attr-defined]
    return ids


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_the_stream_goes_on_without_the_scheduler(
    fragile: Stack, quiet: Answer, number: signal.Signals
) -> None:
    pid = fragile.scheduler()["pid"]
    resumed = fragile.metric(RESUMED)
    disturbed = stream(fragile, number)
    assert disturbed.ids == quiet.ids
    assert disturbed.pause_s < PAUSE_S
    fragile.wait_until(fragile.is_ready, "readiness")
    if number == signal.SIGSTOP:  # it is told to go on, and need not be replaced
        assert fragile.scheduler()["pid"] == pid
    else:
        assert fragile.scheduler()["pid"] != pid
        assert fragile.metric(RESUMED) == resumed + 1


def test_a_new_request_waits_for_the_scheduler(fragile: Stack, quiet: Answer) -> None:
    os.kill(fragile.scheduler()["pid"], signal.SIGKILL)
    assert stream(fragile).ids == quiet.ids
