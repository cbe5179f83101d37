"""The real gateway on a loopback port, in front of a fake scheduler."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
from support.fakes import scheduler as fake_scheduler
from support.fakes.scheduler import Deliveries, FakeScheduler, emulated, start, tokens
from support.patience import PATIENCE_S
from surestep_gateway.server import GatewayServer
from surestep_gateway.settings.config import GatewaySettings
from surestep_proto.scheduler_pb2 import LENGTH, GenerateChunk, GenerateRequest


class Stack:
    """A running gateway with its schedulers, of which most tests have one, and a client."""

    def __init__(self, server: GatewayServer, schedulers: Sequence[FakeScheduler]) -> None:
        self.server = server
        self.scheduler = schedulers[0]
        self.schedulers = schedulers
        self.url = f"http://{server.address}"
        self.client = httpx.AsyncClient(base_url=self.url, timeout=PATIENCE_S)

    async def until_serving(self, count: int = 1, timeout_s: float = PATIENCE_S) -> None:
        """Wait until so many schedulers would be sent requests."""
        schedulers = [scheduler for _, scheduler in self.server.models.schedulers]
        async with asyncio.timeout(timeout_s):
            while sum(scheduler.admits(time.monotonic()) for scheduler in schedulers) != count:
                await asyncio.sleep(0.005)

    async def chat(self, **body: Any) -> httpx.Response:
        """A chat completion."""
        messages = [{"role": "user", "content": "hello"}]
        return await self.client.post("/v1/chat/completions", json={"messages": messages} | body)

    async def complete(self, **body: Any) -> httpx.Response:
        """A completion."""
        return await self.client.post("/v1/completions", json={"prompt": "hello"} | body)

    async def post(self, path: str, body: bytes | AsyncIterator[bytes]) -> httpx.Response:
        """A body that is said to be JSON."""
        headers = {"content-type": "application/json"}
        return await self.client.post(path, content=body, headers=headers)

    async def stream(self, path: str, **body: Any) -> Events:
        """All events of a streamed answer."""
        response = await self.client.post(path, json=body | {"stream": True})
        assert response.status_code == 200, response.text
        return Events.parse(response.text)

    @contextlib.asynccontextmanager
    async def begun(self, path: str, **body: Any) -> AsyncIterator[Callable[[], Awaitable[Events]]]:
        """A streamed answer of which the client has the first event; what is yielded waits for all
        events."""
        async with self.client.stream("POST", path, json=body | {"stream": True}) as response:
            assert response.status_code == 200, await response.aread()
            pieces = response.aiter_text()
            first = await anext(pieces)

            async def rest() -> Events:
                return Events.parse("".join([first, *[piece async for piece in pieces]]))

            yield rest


async def streaming(stack: Stack) -> list[str]:
    """The paths that answer with events, as the server describes them."""
    return [path for path, post in (await _posts(stack)).items() if "event-stream" in str(post)]


async def counted(stack: Stack) -> list[str]:
    """The paths that may answer that too many requests are open."""
    return [path for path, post in (await _posts(stack)).items() if "429" in post["responses"]]


async def _posts(stack: Stack) -> dict[str, Any]:
    paths = (await stack.client.get("/openapi.json")).json()["paths"]
    return {path: one["post"] for path, one in paths.items() if "post" in one}


class Paused:
    """A script that sends `count` tokens, then waits until `go` is set."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.sent = asyncio.Event()  # the tokens are on their way
        self.go = asyncio.Event()

    async def __call__(self, request: GenerateRequest) -> AsyncIterator[GenerateChunk]:
        if self.count:
            yield start()
        ids = emulated(request)
        for token in ids[: self.count]:
            yield tokens([token])
        self.sent.set()
        async with asyncio.timeout(30):
            await self.go.wait()
        yield tokens(ids[self.count :], finish=LENGTH)


class Events(list[dict[str, Any]]):
    """The JSON events of a stream; `done` says whether `[DONE]` ended it."""

    done = False

    @classmethod
    def parse(cls, text: str) -> Events:
        events = cls()
        for block in text.removesuffix("\n\n").split("\n\n"):
            data = block.removeprefix("data: ")
            assert data != block, f"not an event: {block!r}"
            assert not events.done, "an event after [DONE]"
            if data == "[DONE]":
                events.done = True
            else:
                events.append(json.loads(data))
        return events

    def choices(self, index: int = 0) -> list[dict[str, Any]]:
        """Choices with this index, in order."""
        found = [choice for event in self for choice in event.get("choices", ())]
        return [choice for choice in found if choice["index"] == index]

    def text(self, index: int = 0) -> str:
        """Text of one choice, of either endpoint."""
        return "".join(
            choice["delta"].get("content", "") if "delta" in choice else choice["text"]
            for choice in self.choices(index)
        )


StartStack = Callable[..., Awaitable[Stack]]


@contextlib.asynccontextmanager
async def stacks(model: Path) -> AsyncIterator[StartStack]:
    """A function that starts a stack, given settings that differ from the default ones."""
    async with contextlib.AsyncExitStack() as cleanup:

        async def start(
            ready: bool = True,
            replicas: int = 1,
            delivers: bool = True,
            models: Sequence[dict[str, Any]] = (),
            **settings: Any,
        ) -> Stack:
            """Of `models`, if there are any, each has a scheduler."""
            schedulers = [
                await cleanup.enter_async_context(
                    fake_scheduler.running(deliveries=Deliveries(known=delivers))
                )
                for _ in range(len(models) or replicas)
            ]
            urls = [f"127.0.0.1:{scheduler.port}" for scheduler in schedulers]
            entries = [
                {"model": model, "scheduler_url": url} | entry
                for entry, url in zip(models, urls, strict=False)
            ]
            given = {
                **({"models": entries} if entries else {"model": model, "scheduler_url": urls}),
                "port": 0,
                "admission_timeout_s": PATIENCE_S,
                "drain_timeout_s": 0.2,
            }
            server = GatewayServer(GatewaySettings.model_validate(given | settings))
            group = await cleanup.enter_async_context(asyncio.TaskGroup())
            group.create_task(server.serve())
            cleanup.callback(server.stop)
            stack = Stack(server, schedulers)
            await cleanup.enter_async_context(stack.client)
            if ready:
                await stack.until_serving(len(schedulers))
            return stack

        yield start
