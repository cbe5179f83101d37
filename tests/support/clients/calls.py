"""Requests by either client of surestep.client, so that one test is about both."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from support.fakes.scheduler import FakeScheduler, emulate
from surestep.client import AsyncClient, Client, Completion, SamplingParams
from surestep_proto.scheduler_pb2 import GenerateRequest

PROMPT = [5, 6, 7]
SAMPLING = SamplingParams(temperature=0.5, seed=9)
OF_THE_CLIENT = {"api_key", "tls", "retry_for_s"}  # options that are not of the request
Generate = Callable[..., Coroutine[Any, Any, Completion]]


async def blocking(server: FakeScheduler | str, **options: Any) -> Completion:
    """The answer to PROMPT, by a client in a thread."""

    def work() -> Completion:
        with Client(_address(server), **_split(options)) as client:
            return client.generate(PROMPT, options.pop("sampling", SAMPLING), **options)

    return await asyncio.to_thread(work)


async def asynchronous(server: FakeScheduler | str, **options: Any) -> Completion:
    """The same by a client of this event loop."""
    async with AsyncClient(_address(server), **_split(options)) as client:
        return await client.generate(PROMPT, options.pop("sampling", SAMPLING), **options)


def _address(server: FakeScheduler | str) -> str:
    return server if isinstance(server, str) else f"127.0.0.1:{server.port}"


def _split(options: dict[str, Any]) -> dict[str, Any]:
    return {name: options.pop(name) for name in OF_THE_CLIENT & options.keys()}


def whole(num_tokens: int) -> list[int]:
    """What a fake scheduler answers."""
    request = GenerateRequest(prompt_ids=PROMPT, sampling=SAMPLING)
    return [emulate(request, len(PROMPT) + i) for i in range(num_tokens)]
