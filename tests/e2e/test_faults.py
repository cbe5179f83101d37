"""A dead or hung worker costs seconds and no request: the client's text is that of a quiet run."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import psutil
import pytest
from e2e.conftest import FLAGS, SPECULATION
from openai import Stream
from openai.types import Completion
from support.clients.completions import client_of, read
from support.faults.server import PACED
from support.processes.stack import Stack, serve

pytestmark = pytest.mark.timeout(180)
MAX_TOKENS = 400


@pytest.fixture(scope="module")
def fragile(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """A server of their own for tests that break it."""
    logs = tmp_path_factory.mktemp("fault-logs")
    flags = (*FLAGS, "--speculative-config", SPECULATION)
    with serve(tiny_model, logs, *flags, variables=PACED) as running:
        yield running


def open_stream(stack: Stack) -> Stream[Completion]:
    client = client_of(stack)
    return client.completions.create(
        model=client.models.list().data[0].id,
        prompt="abcabc abc",
        max_tokens=MAX_TOKENS,
        temperature=0.9,
        seed=23,
        stream=True,
        extra_body={"ignore_eos": True, "return_token_ids": True, "cache_salt": uuid4().hex},
    )  # by the salt nothing is drafted from the answer before, which would be over too soon


def test_a_stopped_worker_ends_with_its_server(tiny_model: Path, tmp_path: Path) -> None:
    with serve(tiny_model, tmp_path, *FLAGS) as stack:
        pid = stack.scheduler()["ranks"][0]["pid"]
        os.kill(pid, signal.SIGSTOP)
    assert not psutil.pid_exists(pid)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_the_stream_goes_on_without_the_worker(fragile: Stack, number: signal.Signals) -> None:
    quiet = read(open_stream(fragile)).ids
    assert len(quiet) == MAX_TOKENS
    rank_pid = fragile.status()["scheduler"]["ranks"][0]["pid"]
    assert read(open_stream(fragile), lambda: os.kill(rank_pid, number)).ids == quiet
    status = fragile.status()["scheduler"]
    assert status["ranks"][0]["pid"] != rank_pid
    assert status["supervisors"][0]["restarts"] >= 1
