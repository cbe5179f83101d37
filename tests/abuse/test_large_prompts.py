"""Prompts that cannot fit are refused for their length, before anybody makes tokens of them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import NamedTuple

import httpx
import psutil
import pytest
from support.fakes.scheduler import FakeScheduler, running
from support.processes.commands import children
from support.processes.gateway import gateway, until_ready
from support.processes.gateway_stack import StartStack, stacks
from support.processes.ports import free_port
from surestep_gateway.text.tokenizer import Texts, Tokenizer

SIZE = 30 << 20
MOST_S = 10  # without the check: half a minute and more
MOST_BYTES = 600 << 20  # without it: four gigabytes
TEXT = b"the quick brown " * (SIZE // 16)
WORD = b"x" * SIZE
IDS = b"[%b]" % b",".join([b"70"] * (SIZE // 3))
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
REFUSED = [
    (COMPLETIONS, b'{"prompt": "%b"}' % TEXT, "prompt"),
    (COMPLETIONS, b'{"prompt": "%b"}' % WORD, "prompt"),
    (COMPLETIONS, b'{"prompt": ["x", "%b"]}' % TEXT, "prompt"),
    (COMPLETIONS, b'{"prompt": %b}' % IDS, "prompt"),
    (CHAT, b'{"messages": [{"role": "user", "content": "%b"}]}' % TEXT, "messages"),
    ("/tokenize", b'{"prompt": "%b"}' % TEXT, "prompt"),
    ("/detokenize", b'{"tokens": %b}' % IDS, "tokens"),
]


class Server(NamedTuple):
    client: httpx.AsyncClient
    process: psutil.Process
    scheduler: FakeScheduler

    def memory(self) -> int:
        """Bytes of the gateway and its text processes."""
        every = [self.process, *self.process.children()]
        return sum(one.memory_info().rss for one in every if one.is_running())


@pytest.fixture
async def server(model: Path) -> AsyncIterator[Server]:
    port = free_port()
    async with (
        running() as scheduler,
        gateway(model, port, scheduler.port) as process,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60) as client,
    ):
        await until_ready(client, process)
        yield Server(client, psutil.Process(process.pid), scheduler)


async def watched(server: Server, path: str, body: bytes) -> tuple[httpx.Response, float, int]:
    """An answer, the seconds it took, and the bytes that memory grew meanwhile."""
    before = most = server.memory()
    began = time.monotonic()
    headers = {"content-type": "application/json"}
    answer = asyncio.ensure_future(server.client.post(path, content=body, headers=headers))
    while not answer.done():
        await asyncio.wait([answer], timeout=0.02)
        most = max(most, server.memory())
    return answer.result(), time.monotonic() - began, most - before


async def test_thirty_megabytes(server: Server) -> None:
    warm = await server.client.post(COMPLETIONS, json={"prompt": "x", "metadata": "y" * 100_000})
    assert warm.status_code == 200
    sent = len(server.scheduler.requests)
    for path, body, param in REFUSED:
        answer, seconds, grown = await watched(server, path, body)
        assert answer.status_code == 400, answer.text[:500]
        assert answer.json()["error"]["param"] == param
        assert len(answer.text) < 1000
        assert seconds < MOST_S, path
        assert grown < MOST_BYTES, (path, grown)
    assert len(server.scheduler.requests) == sent
    cut = b'{"prompt": "%b", "truncate_prompt_tokens": 5, "max_tokens": 1}' % TEXT
    answer, seconds, grown = await watched(server, COMPLETIONS, cut)
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["prompt_tokens"] == 5
    assert seconds < MOST_S
    assert grown < MOST_BYTES


@pytest.fixture
async def start_stack(model: Path) -> AsyncIterator[StartStack]:
    async with stacks(model) as start:
        yield start


async def test_texts_up_to_the_bound_are_as_they_were(start_stack: StartStack, model: Path) -> None:
    """The longest text that could fit has its tokens counted; truncation sees the end of the text."""
    stack = await start_stack()
    tokenizer = Tokenizer.load(model)
    most = tokenizer.most_chars(256)
    assert most is not None
    text = ("the quick brown fox " * most)[:most]
    (ids,) = tokenizer.encode(Texts([text], add_special_tokens=True))
    answer = await stack.complete(prompt=text)
    assert f"its {len(ids)} tokens leave no room" in answer.json()["error"]["message"]
    longer = await stack.complete(prompt=text + "x")
    assert f"its {most + 1} characters cannot fit" in longer.json()["error"]["message"]
    for prompt in (text, "y" * 5000 + text):
        cut = await stack.complete(prompt=prompt, truncate_prompt_tokens=100, max_tokens=1)
        assert cut.status_code == 200
        assert list(stack.scheduler.requests[-1].prompt_ids) == ids[-100:]


async def test_ids_are_counted_before_they_are_looked_at(start_stack: StartStack) -> None:
    stack = await start_stack()
    answer = await stack.complete(prompt=[10**9] * 256)
    assert "256 tokens" in answer.json()["error"]["message"]
    answer = await stack.complete(prompt=[10**9] * 255)
    assert "not in the vocabulary" in answer.json()["error"]["message"]


async def test_tokenizing_counts_as_an_open_request(start_stack: StartStack) -> None:
    stack = await start_stack(max_concurrent_requests=1, text_processes=1)
    padded = {"prompt": "x", "metadata": "y" * 100_000}
    assert (await stack.client.post("/tokenize", json=padded)).status_code == 200
    (text,) = children("surestep_gateway.text_process")
    text.suspend()
    for path, body in (
        ("/tokenize", padded),
        ("/detokenize", {"tokens": [5], "metadata": "y" * 100_000}),
    ):
        waiting = asyncio.ensure_future(stack.client.post(path, json=body))
        async with asyncio.timeout(10):
            while stack.server.gateway.admission.num_open != 1:
                await asyncio.sleep(0.01)
        assert (await stack.chat(max_tokens=1)).status_code == 429
        assert (await stack.client.post("/tokenize", json={"prompt": "x"})).status_code == 429
        waiting.cancel()
        async with asyncio.timeout(10):
            while stack.server.gateway.admission.num_open:
                await asyncio.sleep(0.01)
        assert (await stack.chat(max_tokens=1)).status_code == 200
    text.resume()
