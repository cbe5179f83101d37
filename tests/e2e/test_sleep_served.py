"""A served engine that sleeps and wakes: its memory, its requests, its words, and its deaths."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from e2e.conftest import SPECULATION
from support.clients.completions import client_of, read
from support.faults.server import serve_for_faults
from support.processes.stack import Stack

pytestmark = [pytest.mark.timeout(240), pytest.mark.rotates(3)]

KEY = {"authorization": "Bearer admin"}
LONG: dict[str, Any] = {"prompt": "abcabc abc", "max_tokens": 400, "seed": 5, "temperature": 0.8}


@pytest.fixture(scope="module")
def sleeper(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """At a pace at which a request is still open when something is done to it."""
    flags = "--speculative-config", SPECULATION, "--enable-sleep-mode", "--admin-api-key", "admin"
    with serve_for_faults(tiny_model, tmp_path_factory.mktemp("sleeper"), *flags) as running:
        running.stack.headers = KEY
        yield running.stack


def order(stack: Stack, path: str, expect: int = 200) -> Any:
    reply = httpx.post(stack.url + path, headers=KEY, timeout=90)
    assert reply.status_code == expect, reply.text
    return reply.json()


def asks(stack: Stack, path: str) -> Any:
    reply = httpx.get(stack.url + path, headers=KEY, timeout=30)
    assert reply.status_code == 200, reply.text
    return reply.json()


def answer(stack: Stack, disturb: Callable[[], object] | None = None) -> list[int]:
    """Token ids of one stream."""
    extra = {"ignore_eos": True, "return_token_ids": True}
    stream = client_of(stack).completions.create(
        model="tiny", stream=True, extra_body=extra, **LONG
    )
    return read(stream, disturb).ids


@pytest.fixture(scope="module")
def whole(sleeper: Stack) -> list[int]:
    """The answer of an engine that nobody disturbs."""
    return answer(sleeper)


def private_bytes(stack: Stack) -> int:
    """Memory that the supervisor's processes have to themselves, the rank's among them."""
    (pid,) = (each["pid"] for each in stack.scheduler()["supervisors"])
    total = 0
    for process in (psutil.Process(pid), *psutil.Process(pid).children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):
            total += process.memory_full_info().uss
    return total


def cache_bytes(supervisor: Mapping[str, Any]) -> int:
    """Memory of the caches that outlive a rank."""
    files = Path(f"/proc/{supervisor['pid']}/fd").iterdir()
    return sum(
        file.stat().st_blocks * 512 for file in files if "surestep-caches" in os.readlink(file)
    )


@pytest.mark.parametrize("level", [1, 2])
def test_memory_is_given_back(sleeper: Stack, whole: list[int], level: int) -> None:
    (supervisor,) = sleeper.scheduler()["supervisors"]
    assert answer(sleeper) == whole
    assert cache_bytes(supervisor) > 100_000
    rank = psutil.Process(supervisor["rank_pid"]).memory_full_info()
    before = private_bytes(sleeper)
    (told,) = order(sleeper, f"/sleep?level={level}")["schedulers"]
    try:
        assert not psutil.pid_exists(supervisor["rank_pid"])
        # It shares the pages of its template.
        assert before - private_bytes(sleeper) > 0.9 * rank.uss > 20e6
        assert cache_bytes(supervisor) == 0
        held = supervisor["held_weight_bytes"]
        assert told["held_weight_bytes"] == (held if level == 1 else 0)
        assert asks(sleeper, "/is_sleeping") == {"is_sleeping": True}
        assert sleeper.scheduler()["supervisors"][0]["rank_state"] == "ASLEEP"
    finally:
        order(sleeper, "/wake_up")
    assert asks(sleeper, "/is_sleeping") == {"is_sleeping": False}
    assert sleeper.is_ready()


@pytest.mark.parametrize("path", ["/sleep?level=0", "/sleep?level=1", "/sleep?level=2", "/pause?"])
def test_a_kept_stream_goes_on(sleeper: Stack, whole: list[int], path: str) -> None:
    def nap() -> None:
        order(sleeper, f"{path}&mode=keep")
        time.sleep(0.3)  # in which the stream would go on if it could
        order(sleeper, "/resume" if path.startswith("/pause") else "/wake_up")

    assert answer(sleeper, nap) == whole


def test_what_it_says_meanwhile(sleeper: Stack, whole: list[int]) -> None:
    """Probes tell the truth; a new request waits, or is refused, as the mode says."""
    url, body = sleeper.url, {"prompt": "a", "max_tokens": 2, "model": "tiny"}
    with ThreadPoolExecutor(1) as pool:
        order(sleeper, "/sleep?mode=keep")
        assert httpx.get(f"{url}/health").status_code == 200
        ready = httpx.get(f"{url}/health/ready")
        assert ready.status_code == 503
        assert "the engine is asleep (level 1): an operator asked for it" in ready.text
        waiting = pool.submit(httpx.post, f"{url}/v1/completions", json=body, timeout=90)
        order(sleeper, "/wake_up?tags=weights")
        assert asks(sleeper, "/is_sleeping") == {"is_sleeping": True}
        assert not waiting.done()
        order(sleeper, "/wake_up?tags=kv_cache")
        assert waiting.result().status_code == 200
    order(sleeper, "/sleep")
    began = time.monotonic()
    refused = httpx.post(f"{url}/v1/completions", json=body, timeout=90)
    assert (refused.status_code, time.monotonic() - began < 5) == (503, True)
    assert "asleep" in refused.text
    order(sleeper, "/wake_up")
    assert answer(sleeper) == whole


def test_aborted_streams_keep_what_they_have(sleeper: Stack, whole: list[int]) -> None:
    client, finished = client_of(sleeper), []
    extra = {"ignore_eos": True, "return_token_ids": True}
    stream = client.completions.create(model="tiny", stream=True, extra_body=extra, **LONG)
    ids: list[int] = []
    for number, chunk in enumerate(stream):
        ids += chunk.choices[0].token_ids or []
        finished.append(chunk.choices[0].finish_reason)
        if number == 5:
            assert order(sleeper, "/abort_requests")["schedulers"][0]["num_aborted"] == 1
    assert finished[-1] == "abort"
    assert ids == whole[: len(ids)]
    assert len(ids) < len(whole)


def kill(pid: int) -> None:
    """Kill a process, unless it has ended; 0 stands for none."""
    with contextlib.suppress(ProcessLookupError):
        if pid:
            os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("victim", ["rank on the way", "standby", "supervisor", "scheduler"])
def test_a_process_dies_in_a_sleep(sleeper: Stack, whole: list[int], victim: str) -> None:
    def nap() -> None:
        scheduler = sleeper.scheduler()
        (supervisor,) = scheduler["supervisors"]
        if victim == "rank on the way":
            threading.Timer(0.01, kill, [supervisor["rank_pid"]]).start()
        order(sleeper, "/sleep?mode=keep")
        if victim == "standby":
            kill(supervisor["standby_pid"])
        if victim in ("supervisor", "scheduler"):
            old = supervisor["pid"] if victim == "supervisor" else scheduler["pid"]
            kill(old)
            sleeper.wait_until(lambda: sleeps_without(sleeper, victim, old), "sleep after that")
        order(sleeper, "/wake_up")

    assert answer(sleeper, nap) == whole


def sleeps_without(stack: Stack, victim: str, old: int) -> bool:
    """Return whether another process has taken the place of the old one, and all sleep."""
    told = stack.status()["scheduler"]
    if told is None or not told["supervisors"]:
        return False
    pid = told["pid"] if victim == "scheduler" else told["supervisors"][0]["pid"]
    asleep = told["supervisors"][0]["rank_state"] == "ASLEEP"
    return bool(pid != old and asleep and told["state"] == "SLEEPING")


def test_cached_prefixes_are_forgotten_under_an_open_stream(
    sleeper: Stack, whole: list[int]
) -> None:
    body = {"model": "tiny", "prompt": "xyz" * 40, "max_tokens": 2}

    def cached_tokens() -> int:
        reply = httpx.post(f"{sleeper.url}/v1/completions", json=body, timeout=30)
        details = reply.json()["usage"]["prompt_tokens_details"]
        return int(details["cached_tokens"]) if details else 0

    cached_tokens()
    assert cached_tokens() > 0
    assert answer(sleeper, lambda: order(sleeper, "/reset_prefix_cache")) == whole
    assert asks(sleeper, "/is_paused") == {"is_paused": False}
    assert cached_tokens() == 0
    order(sleeper, "/pause")
    try:
        order(sleeper, "/reset_prefix_cache", expect=400)
    finally:
        order(sleeper, "/resume")


def test_a_trainer_is_told_what_is_served(sleeper: Stack) -> None:
    info = asks(sleeper, "/server_info?config_format=json")["vllm_config"]
    assert info["model_config"]["dtype"] == "torch.float32"
    assert info["speculative_config"]["method"] == "ngram"
    assert asks(sleeper, "/get_world_size") == {"world_size": 1}
    assert json.loads(asks(sleeper, "/server_info")["vllm_config"]) == info
