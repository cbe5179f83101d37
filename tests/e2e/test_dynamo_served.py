"""Behind NVIDIA Dynamo's own frontend: answers are ours, and a lost worker changes no token."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from support.checkpoints.tiny import make_tiny_checkpoint
from support.processes.ports import free_port
from support.processes.stack import Stack, environment, serve


def is_installed() -> bool:
    """Whether there is more of that name than our folder of tests."""
    with contextlib.suppress(ModuleNotFoundError):
        return find_spec("dynamo.llm") is not None
    return False


pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(not is_installed(), reason="ai-dynamo is not installed"),
]
PLANES = ("--discovery-backend", "file", "--request-plane", "tcp", "--event-plane", "zmq")
TOKENS, KEY, MODEL = 400, "dynamo-test", "tiny"
START_S = 120


class Dynamo:
    """A frontend and workers before schedulers."""

    def __init__(self, folder: Path, scheduler: str) -> None:
        """`scheduler`: of workers that have no other."""
        self._folder, self._scheduler = folder, scheduler
        self._variables = {"DYN_FILE_KV": str(folder / "kv")}
        self.processes: list[subprocess.Popen[bytes]] = []
        self.url = ""

    def start(self, name: str, *words: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", *words, *PLANES]
        with (self._folder / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                command, env=environment(self._variables), stdout=log, stderr=subprocess.STDOUT
            )
        self.processes.append(process)
        return process

    def frontend(self, *more: str) -> None:
        port = free_port()
        self.url = f"http://127.0.0.1:{port}/v1"
        words = "--http-host", "127.0.0.1", "--http-port", str(port), "--migration-limit", "20"
        self.start("frontend", "dynamo.frontend", *words, *more)

    async def worker(self, *more: str) -> subprocess.Popen[bytes]:
        """Start one more when the dead are forgotten, and wait until the frontend knows it."""
        words = "--grpc-api-key", KEY, *more  # named as its folder
        if "--scheduler" not in more:
            words = "--scheduler", self._scheduler, *words
        async with httpx.AsyncClient() as client, asyncio.timeout(START_S):
            await self._know_the_living(client)
            process = self.start("worker", "surestep_cli", "dynamo", *words)
            await self._know_the_living(client)
        return process

    async def _know_the_living(self, client: httpx.AsyncClient) -> None:
        while await self.num_known(client) != sum(p.poll() is None for p in self.processes[1:]):
            await asyncio.sleep(0.1)

    async def num_known(self, client: httpx.AsyncClient) -> int:
        """Workers that the frontend would ask."""
        with contextlib.suppress(httpx.HTTPError):
            if (await client.get(f"{self.url}/models")).json()["data"]:
                health = await client.get(self.url.removesuffix("v1") + "health")
                known = health.json()["instances"]
                return sum(one["endpoint"] == "generate" for one in known)
        return 0

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / MODEL
    return make_tiny_checkpoint(folder, seed=7, tokenizer=True, max_position=2048)


@contextlib.contextmanager
def served(model: Path, logs: Path, *flags: str, address: str = "") -> Iterator[tuple[Stack, str]]:
    """A server with a scheduler at this address."""
    address = address or f"127.0.0.1:{free_port()}"
    own = "--scheduler-listen", address, "--grpc-api-key", KEY, "--kv-cache-memory", "0.1"
    with serve(model, logs, *own, *flags) as running:
        yield running, address


@pytest.fixture(scope="module")
def stack(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Stack, Dynamo]]:
    folder = tmp_path_factory.mktemp("dynamo")
    with served(model, folder / "logs") as (running, address), contextlib.ExitStack() as ends:
        dynamo = Dynamo(folder, address)
        ends.callback(dynamo.kill)
        dynamo.frontend()
        yield running, dynamo


@contextlib.asynccontextmanager
async def client_of(url: str) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
        yield client


async def streamed(url: str, number: int, seen: list[int], **fields: Any) -> str:
    """The text of a stream; `seen` counts its events."""
    text = ""
    async with client_of(url) as client:
        stream = await client.completions.create(
            model=MODEL,
            prompt=f"text {number}",
            seed=number,
            stream=True,
            **{
                "max_tokens": TOKENS,
                "temperature": 0.8,
                "extra_body": {"ignore_eos": True},
                **fields,
            },
        )
        async for event in stream:
            seen[number] += 1
            text += event.choices[0].text if event.choices else ""
    return text


async def all_streamed(
    url: str, hurt: Callable[[list[int]], bool] | None = None, **fields: Any
) -> list[str]:
    """The texts of four streams; `hurt` does so when it is time, by the events seen, and says so."""
    seen = [0] * 4
    async with asyncio.TaskGroup() as tasks:
        asked = [tasks.create_task(streamed(url, n, seen, **fields)) for n in range(4)]
        while hurt is not None and not await asyncio.to_thread(hurt, seen):
            assert not any(task.done() for task in asked), "too late"
    return [task.result() for task in asked]


HELD = {"presence_penalty": 0.8}
AT_LEAST = {"extra_body": {"min_tokens": 300}}  # what is left of it must move


@pytest.mark.parametrize("fields", [{}, HELD, AT_LEAST], ids=["plain", "held", "at least"])
async def test_a_killed_worker_changes_no_text(
    stack: tuple[Stack, Dynamo], fields: dict[str, Any]
) -> None:
    """With tokens that have gone out, and with an answer that is held back."""
    running, dynamo = stack
    await dynamo.worker()
    quiet = await all_streamed(dynamo.url, **fields)
    ours = await all_streamed(running.url + "/v1", **fields)
    assert quiet == ours
    first = dynamo.processes[1:]
    await dynamo.worker()

    def hurt(seen: list[int]) -> bool:
        held = fields is HELD
        is_time = running.metric("vllm:num_requests_running") == 4 if held else min(seen) > 4
        for process in first if is_time else ():
            process.kill()
        return is_time

    assert await all_streamed(dynamo.url, hurt, **fields) == quiet


async def test_a_dead_registration_gets_no_answer_lost(stack: tuple[Stack, Dynamo]) -> None:
    """Dynamo asks a worker that is gone until its lease ends; each time another one answers."""
    _, dynamo = stack
    dead = await dynamo.worker()
    await dynamo.worker()
    dead.kill()
    dead.wait()
    num_alive = sum(process.poll() is None for process in dynamo.processes[1:])
    async with httpx.AsyncClient() as client, asyncio.timeout(30):
        while await dynamo.num_known(client) != num_alive:
            assert len(await streamed(dynamo.url, 0, [0], max_tokens=4)) > 0


async def test_a_worker_of_another_model_than_is_registered_ends(
    model: Path, tmp_path: Path
) -> None:
    """None of its tokens is answered by a model whose tokenizer was not asked."""
    other = make_tiny_checkpoint(
        tmp_path / "other" / MODEL, seed=8, tokenizer=True, max_position=1024
    )
    dynamo, ends = Dynamo(tmp_path, ""), contextlib.ExitStack()
    try:
        dynamo.frontend()
        first = served(model, tmp_path / "first")
        _, address = await asyncio.to_thread(ends.enter_context, first)
        process = await dynamo.worker("--scheduler", address)
        assert await streamed(dynamo.url, 0, [0], max_tokens=4)
        await asyncio.to_thread(ends.close)
        second = served(other, tmp_path / "second", address=address)
        await asyncio.to_thread(ends.enter_context, second)
        with pytest.raises(openai.APIError):
            await streamed(dynamo.url, 0, [0], max_tokens=4)
        assert await asyncio.to_thread(process.wait, 60) == 0
        assert "another model than is registered" in (tmp_path / "worker.log").read_text()
    finally:
        dynamo.kill()
        await asyncio.to_thread(ends.close)


async def test_a_killed_rank_changes_no_text(stack: tuple[Stack, Dynamo]) -> None:
    running, dynamo = stack
    await dynamo.worker()
    quiet = await all_streamed(dynamo.url)
    pid = running.scheduler()["ranks"][0]["pid"]

    def hurt(seen: list[int]) -> bool:
        if min(seen) > 4:
            os.kill(pid, signal.SIGKILL)
        return min(seen) > 4

    assert await all_streamed(dynamo.url, hurt) == quiet
    assert running.scheduler()["ranks"][0]["pid"] != pid


@pytest.fixture
def another(model: Path, tmp_path: Path) -> Iterator[tuple[Stack, str]]:
    with served(model, tmp_path) as server:
        yield server


async def test_streams_leave_a_scheduler_without_workers(
    stack: tuple[Stack, Dynamo], another: tuple[Stack, str]
) -> None:
    _, dynamo = stack
    first, address = another
    with contextlib.ExitStack() as ends:
        await dynamo.worker()
        quiet = await all_streamed(dynamo.url)
        worker = await dynamo.worker("--scheduler", address, "--retry-for-s", "1")
        ends.callback(worker.wait)
        ends.callback(worker.kill)
        (supervisor,) = first.scheduler()["supervisors"]

        def hurt(seen: list[int]) -> bool:
            if is_time := min(seen) > 4:
                assert first.scheduler()["num_open_requests"] > 0
                for pid in (supervisor["pid"], supervisor["rank_pid"]):
                    os.kill(pid, signal.SIGKILL)
            return is_time

        with first.launcher_stopped():
            assert await all_streamed(dynamo.url, hurt) == quiet
            assert first.scheduler()["num_open_requests"] == 0
        await asyncio.to_thread(first.wait_until, first.is_ready, "its workers")


async def test_what_is_wrong_is_the_clients_mistake(stack: tuple[Stack, Dynamo]) -> None:
    _, dynamo = stack
    await dynamo.worker()
    async with client_of(dynamo.url) as client:
        with pytest.raises(openai.BadRequestError, match="one choice alone"):
            await client.completions.create(model=MODEL, prompt="x", n=2, max_tokens=2)
        schema = {"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a"]}
        answer = await client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "go"}],
            max_tokens=40,
            response_format={
                "type": "json_schema",
                "json_schema": {"name": "s", "schema": schema | {"additionalProperties": False}},
            },
        )
    assert json.loads(answer.choices[0].message.content or "") == {"a": 1}


async def test_a_client_that_leaves_is_noticed(stack: tuple[Stack, Dynamo]) -> None:
    running, dynamo = stack
    await dynamo.worker()
    async with client_of(dynamo.url) as client:
        stream = await client.completions.create(
            model=MODEL, prompt="x", max_tokens=1900, stream=True, extra_body={"ignore_eos": True}
        )
        await anext(aiter(stream))
        await stream.close()
    running.wait_until(lambda: running.metric("vllm:num_requests_running") == 0, "the end", 30)


async def test_a_worker_that_is_told_to_stop_does(stack: tuple[Stack, Dynamo]) -> None:
    _, dynamo = stack
    process = await dynamo.worker()
    process.send_signal(signal.SIGTERM)
    assert await asyncio.to_thread(process.wait, 60) == 0


@pytest.fixture
def pair(model: Path, tmp_path: Path) -> Iterator[list[tuple[Stack, str, str]]]:
    """Two servers, the addresses of their schedulers and of their events."""
    with contextlib.ExitStack() as ends:
        servers = []
        for name in ("first", "second"):
            endpoint = f"tcp://127.0.0.1:{free_port()}"
            config = {
                "enable_kv_cache_events": True,
                "endpoint": endpoint.replace("127.0.0.1", "*"),
            }
            flags = "--kv-events-config", json.dumps(config), "--share-prefix-cache-between-keys"
            server = ends.enter_context(served(model, tmp_path / name, *flags))
            servers.append((*server, endpoint))
        yield servers


async def num_stored(url: str, client: httpx.AsyncClient) -> float:
    """Stores that the router has taken in."""
    text = (await client.get(url.removesuffix("v1") + "metrics")).text
    lines = [line for line in text.splitlines() if "kv_cache_events_applied{" in line]
    stored = [line for line in lines if 'event_type="stored",status="ok"' in line]
    return sum(float(line.rsplit(" ", 1)[1]) for line in stored)


async def stored(url: str, known: float) -> float:
    """Wait until the router has taken in more stores than that. Return how many."""
    async with httpx.AsyncClient() as client, asyncio.timeout(30):
        while (count := await num_stored(url, client)) <= known:
            await asyncio.sleep(0.05)
    return count


async def test_prompts_go_where_their_beginning_is(
    pair: list[tuple[Stack, str, str]], tmp_path: Path
) -> None:
    """The router never saw it: each scheduler was asked by its own gateway, and told of its blocks.

    Some were told before the router came, and some have a salt.
    """
    dynamo, known = Dynamo(tmp_path, pair[0][1]), 0.0

    def prompt(name: str) -> str:
        return " ".join(f"{name} {n}" for n in range(60))

    async def ask(url: str, name: str, end: str = "", **fields: Any) -> None:
        async with client_of(url) as client, asyncio.timeout(60):
            text = prompt(name) + end
            await client.completions.create(
                model=MODEL, prompt=text, max_tokens=2, extra_body=fields
            )

    try:
        dynamo.frontend("--router-mode", "kv")
        for name, (home, address, endpoint) in zip(("red", "blue"), pair, strict=True):
            await ask(home.url + "/v1", name)
            await dynamo.worker("--scheduler", address, "--kv-events-endpoint", endpoint)
            known = await stored(dynamo.url, known)
        for number, name in enumerate(("red", "blue", "green", "grey", "pink", "gold")):
            home, away = pair[number % 2][0], pair[1 - number % 2][0]
            salt = {"cache_salt": name} if number > 3 else {}
            if number > 1:
                await ask(home.url + "/v1", name, **salt)
                known = await stored(dynamo.url, known)
            before = away.metric("vllm:prompt_tokens_total")
            found = home.metric("vllm:prefix_cache_hits_total")
            await ask(dynamo.url, name, " end", nvext=salt)
            assert home.metric("vllm:prefix_cache_hits_total") >= found + 200, name
            assert away.metric("vllm:prompt_tokens_total") == before, name
    finally:
        dynamo.kill()
