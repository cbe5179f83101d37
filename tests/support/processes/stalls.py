"""What others notice of a busy gateway: how long its event loop stands still, and their streams."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import NamedTuple

import httpx
from support.fakes.scheduler import emulating, start, tokens
from surestep_proto.scheduler_pb2 import LENGTH, GenerateChunk, GenerateRequest

STREAM = 7777  # the length that asks for a stream that goes on throughout
LIMIT_S = "0.05"


class Stalls(NamedTuple):
    """Longer than the limit, as the gateway has measured them."""

    stalls: int
    busy: int  # of them, those in which the loop computed, and others had not the CPU

    def since(self, before: Stalls) -> Stalls:
        return Stalls(self.stalls - before.stalls, self.busy - before.busy)


async def long_stalls(client: httpx.AsyncClient) -> Stalls:
    text = (await client.get("/metrics")).text
    lines = dict(line.rsplit(" ", 1) for line in text.splitlines() if line[0] != "#")

    def longer(name: str) -> int:
        within = float(lines[f'{name}_bucket{{le="{LIMIT_S}"}}'])
        return int(float(lines[f"{name}_count"]) - within)

    return Stalls(
        longer("surestep:event_loop_stall_seconds"), longer("surestep:event_loop_busy_seconds")
    )


async def script(request: GenerateRequest) -> AsyncIterator[GenerateChunk]:
    """What a fake scheduler does: a token each 10 ms for whoever asks for a stream of STREAM."""
    if request.max_tokens != STREAM:
        async for chunk in emulating(request):
            yield chunk
        return
    yield start()
    for _ in range(STREAM - 1):
        yield tokens([70])
        await asyncio.sleep(0.01)
    yield tokens([70], finish=LENGTH)


class Watched(NamedTuple):
    """A stream of another client."""

    events: int
    longest_gap_s: float


async def read_stream(
    client: httpx.AsyncClient, done: asyncio.Event, headers: dict[str, str] | None = None
) -> Watched:
    """Read until all is over."""
    body = {"prompt": "x", "max_tokens": STREAM, "stream": True}
    count, longest, last = 0, 0.0, 0.0
    async with client.stream("POST", "/v1/completions", json=body, headers=headers) as response:
        async for line in response.aiter_lines():
            now = time.monotonic()
            longest, last = max(longest, now - last) if count else 0.0, now
            count += bool(line)
            if done.is_set():
                break
    return Watched(count, longest)
