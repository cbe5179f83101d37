"""The real gateway on a loopback port, in front of a fake scheduler."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import fake_scheduler
import httpx
import pytest
import tiny_tokenizer
from fake_scheduler import FakeScheduler
from surestep_gateway.config import GatewaySettings
from surestep_gateway.server import GatewayServer


class Stack:
    """A running gateway with its scheduler and a client."""

    def __init__(self, server: GatewayServer, scheduler: FakeScheduler) -> None:
        self.server = server
        self.scheduler = scheduler
        self.url = f"http://{server.address}"
        self.client = httpx.AsyncClient(base_url=self.url, timeout=20)

    async def chat(self, **body: Any) -> httpx.Response:
        """A chat completion."""
        messages = [{"role": "user", "content": "hello"}]
        return await self.client.post("/v1/chat/completions", json={"messages": messages} | body)

    async def complete(self, **body: Any) -> httpx.Response:
        """A completion."""
        return await self.client.post("/v1/completions", json={"prompt": "hello"} | body)


StartStack = Callable[..., Awaitable[Stack]]


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model folder: a tokenizer and nothing else."""
    return tiny_tokenizer.save(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
async def start_stack(model: Path) -> AsyncIterator[StartStack]:
    """Starts a stack with settings that differ from the default ones."""
    async with contextlib.AsyncExitStack() as cleanup:

        async def start(ready: bool = True, **settings: Any) -> Stack:
            scheduler = await cleanup.enter_async_context(fake_scheduler.running())
            server = GatewayServer(
                GatewaySettings.model_validate(
                    {
                        "model": model,
                        "port": 0,
                        "scheduler_address": f"127.0.0.1:{scheduler.port}",
                        "drain_timeout_s": 0.2,
                        **settings,
                    }
                )
            )
            group = await cleanup.enter_async_context(asyncio.TaskGroup())
            group.create_task(server.serve())
            cleanup.callback(server.stop)
            stack = Stack(server, scheduler)
            await cleanup.enter_async_context(stack.client)
            if ready:
                await server.gateway.link.wait_until_serving(10)
            return stack

        yield start


@pytest.fixture
async def stack(start_stack: StartStack) -> Stack:
    """A stack with default settings."""
    return await start_stack()
