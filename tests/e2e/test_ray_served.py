"""Under Ray Serve: answers are ours, streams come as they are made, replicas come by our metrics."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from support.checkpoints.tiny import make_tiny_checkpoint
from support.processes.ports import free_port
from support.processes.stack import environment, serve

# Ray lives in an environment of its own: pip install 'ray[serve]'.
PYTHON = os.environ.get("RAY_PYTHON", sys.executable)
EXAMPLE = Path(__file__).parents[2] / "examples" / "ray_serve.py"


def is_installed() -> bool:
    """Whether that Python has it; asked of the files alone, since an import takes seconds."""
    asked = "import sys; from importlib.util import find_spec; sys.exit(find_spec('ray') is None)"
    return subprocess.run([PYTHON, "-c", asked], check=False).returncode == 0


pytestmark = [
    pytest.mark.timeout(400),
    pytest.mark.skipif(not is_installed(), reason="ray[serve] is not at RAY_PYTHON"),
]
FLAGS = "--dtype", "float32", "--kv-cache-memory", "0.05", "--served-model-name", "tiny"
START_S = 200


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "tiny"
    return make_tiny_checkpoint(folder, tokenizer=True, max_position=4096)


@pytest.fixture(scope="module")
def alone(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server without Ray."""
    with serve(model, tmp_path_factory.mktemp("alone"), *FLAGS) as stack:
        yield stack.url


@pytest.fixture(scope="module")
def url(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The application with one replica, and one more for more than two requests."""
    port, log = free_port(), tmp_path_factory.mktemp("ray") / "log"
    scaling = "--requests", "2", "--max-replicas", "2", "--delay-s", "3", "--cpus", "0.1"
    started = shlex.join([sys.executable, "-m", "surestep_cli", "serve"])
    command = [PYTHON, str(EXAMPLE), "--port", str(port), *scaling, "--command", started]
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, str(model), "--", *FLAGS],
            env=environment({"RAY_USAGE_STATS_ENABLED": "0"}),
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        until_it_serves(url := f"http://127.0.0.1:{port}", process, log)
        yield url
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(100)
        finally:
            process.kill()
    assert process.returncode == 0, log.read_text(errors="replace")[-8000:]


def until_it_serves(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_S
    while True:
        assert process.poll() is None, log.read_text(errors="replace")[-8000:]
        assert time.monotonic() < deadline, log.read_text(errors="replace")[-8000:]
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(f"{url}/health/ready", timeout=10).status_code == 200:
                return
        time.sleep(0.5)


async def pids(url: str, times: int = 20) -> set[int]:
    """Ranks behind the replicas that answered."""
    found = set()
    async with httpx.AsyncClient(timeout=30) as client:
        for _ in range(times):
            schedulers = (await client.get(f"{url}/status")).json()["schedulers"]
            status = schedulers[0]["status"] or {"ranks": []}
            found |= {rank["pid"] for rank in status["ranks"]}  # none while a rank is replaced
    return found


async def streamed(url: str, seed: int, events: list[str], **fields: Any) -> str:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        stream = await client.completions.create(
            model="tiny", prompt=f"text {seed}", seed=seed, temperature=0.8, stream=True, **fields
        )
        async for event in stream:
            events.append(event.choices[0].text if event.choices else "")
    return "".join(events)


async def test_replicas_come_by_our_metrics_and_change_no_text(alone: str, url: str) -> None:
    """Streams, one behind the other, make a second replica come; a rank dies under them."""
    fields = {"max_tokens": 1000, "extra_body": {"ignore_eos": True}}
    quiet = await asyncio.gather(*(streamed(alone, seed, [], **fields) for seed in range(4)))
    [first] = await pids(url, 3)
    events: list[list[str]] = [[] for _ in range(4)]
    enough = asyncio.Event()

    async def ask(seed: int) -> None:
        while not enough.is_set():
            assert await streamed(url, seed, events[seed], **fields) == quiet[seed]
            events[seed].clear()

    async with asyncio.TaskGroup() as tasks, asyncio.timeout(300):
        for seed in range(4):
            tasks.create_task(ask(seed))
        while not all(len(seen) > 4 for seen in events):
            await asyncio.sleep(0.05)
        os.kill(first, signal.SIGKILL)
        seen = {first}
        while len(seen) < 3:  # the rank in its place, and that of another replica
            seen |= await pids(url)
        enough.set()


async def test_refusals_are_handed_on(url: str) -> None:
    async with httpx.AsyncClient(timeout=60) as client:
        body = {"model": "tiny", "prompt": "x", "temperature": -1}
        refused = await client.post(f"{url}/v1/completions", json=body)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "temperature"
