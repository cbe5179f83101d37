"""The reader of event streams, at the real gateway."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from support.checkpoints import tiny_tokenizer
from support.fakes.scheduler import failing, start, tokens
from support.processes.gateway_stack import Paused, Stack, stacks
from surestep_cli.api.http import posted
from surestep_cli.api.sessions import open_session, stream
from surestep_cli.api.stream import EventReader, StreamEnded, events
from surestep_common.errors import ModelFault
from surestep_proto.scheduler_pb2 import GenerateChunk, GenerateRequest

COMPLETIONS = "v1/completions"
BODY = {"prompt": "hello", "max_tokens": 3, "stream": True, "return_token_ids": True, "seed": 1}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_tokenizer.save(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
async def stack(model: Path) -> AsyncIterator[Stack]:
    async with stacks(model) as begin:
        yield await begin()


class Heard:
    """The token ids of a stream, and the reason why it ended early."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.end: StreamEnded | None = None

    def take(self, event: dict[str, Any]) -> None:
        for choice in event["choices"]:
            self.ids += choice["token_ids"] or ()


async def read(url: str, *, wait_s: float = 20, **changes: Any) -> Heard:
    heard, timeout = Heard(), aiohttp.ClientTimeout(total=None, sock_read=wait_s)
    async with open_session(url, timeout=timeout) as session:
        try:
            await stream(session, COMPLETIONS, BODY | changes, heard.take)
        except StreamEnded as end:
            heard.end = end
    return heard


async def read_blocking(url: str, *, wait_s: float = 20, **changes: Any) -> Heard:
    """Read as `surestep chat` does, which has no aiohttp."""

    def run() -> Heard:
        heard = Heard()
        with posted(f"{url}/{COMPLETIONS}", BODY | changes, timeout_s=wait_s) as response:
            try:
                if response.status != 200:
                    raise StreamEnded.refused(response.status, response.read().decode())
                for event in events(response):
                    heard.take(event)
            except StreamEnded as end:
                heard.end = end
        return heard

    return await asyncio.to_thread(run)


READERS = pytest.mark.parametrize("read", [read, read_blocking])


@READERS
async def test_a_whole_stream(stack: Stack, read: Any) -> None:
    heard = await read(stack.url)
    whole = (await stack.complete(**BODY | {"stream": False})).json()
    assert heard.end is None
    assert heard.ids == whole["choices"][0]["token_ids"]


@READERS
async def test_a_refusal_is_told_in_the_servers_words(stack: Stack, read: Any) -> None:
    end = (await read(stack.url, max_tokens=-1)).end
    assert (end.kind, end.status) == ("HTTP 400", 400)
    assert end.message == f"HTTP 400: {end.detail}"
    assert end.detail.endswith("(max_tokens)")


@READERS
async def test_an_error_ends_a_stream_that_has_begun(stack: Stack, read: Any) -> None:
    stack.scheduler.script = failing(ModelFault("no finite logits"), after=[5, 6])
    heard = await read(stack.url)
    assert heard.ids == [5, 6]
    assert (heard.end.kind, heard.end.status) == ("error in the stream", 200)
    assert "no finite logits" in heard.end.detail


async def test_a_silent_server_is_a_timeout(stack: Stack) -> None:
    stack.scheduler.script = silent = Paused(1)
    heard = await read(stack.url, wait_s=0.3)
    assert (len(heard.ids), heard.end and heard.end.kind) == (1, "timeout")
    silent.go.set()


async def test_what_breaks_off_keeps_its_beginning(stack: Stack) -> None:
    """The gateway ends, at once, in the middle of a stream."""

    async def endless(request: GenerateRequest) -> AsyncIterator[GenerateChunk]:
        yield start()
        yield tokens([5])
        stack.server.stop()
        await asyncio.Event().wait()

    stack.scheduler.script = endless
    heard = await read(stack.url)
    assert heard.ids == [5]
    assert heard.end is not None


async def test_nobody_listens() -> None:
    end = (await read("http://127.0.0.1:9")).end
    assert end is not None
    assert end.kind == "ClientConnectorError"


@pytest.mark.parametrize(
    ("line", "event"),
    [
        (b'data: {"a": 1}\n', {"a": 1}),
        (b'data:{"a": 1}\r\n', {"a": 1}),
        (b"data: [DONE]\n", None),
        (b"\n", None),
        (b": a sign of life\n", None),
        (b"event: data:\n", None),
    ],
)
def test_only_data_lines_carry_events(line: bytes, event: dict[str, int] | None) -> None:
    assert EventReader().feed(line) == event


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"data:\n", "JSONDecodeError: Expecting value"),
        (b"data: {\n", "JSONDecodeError: Expecting property name"),
        (b'data: ["a"]\n', r'no event: \["a"\]'),
        (b"data: 7\n", "no event: 7"),
        (b"data: \xff\n", "UnicodeDecodeError"),
        (b'data: {"error": {"message": "gone", "param": "n"}}\n', r"stream: gone \(n\)"),
        (b'data: {"error": "gone"}\n', "stream: gone"),
        (b'data: {"choices": []}\n', r"ended without \[DONE\]"),
    ],
)
def test_what_ends_a_stream(line: bytes, message: str) -> None:
    with pytest.raises(StreamEnded, match=message):
        list(events([line]))
