"""One stream of completions, with the time of every token, however it ends."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from surestep_cli.api.responses import DONE, payload_of


@dataclass(slots=True)
class Stream:
    """What arrived and when (seconds, monotonic); `failure` is empty when all is well."""

    token_ids: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    failure: str = ""

    def resumed_s(self, moment: float) -> float | None:
        """From a moment to the end of the longest pause after it; None if nothing came then.

        Tokens that were on their way at the moment are not mistaken for the first ones after it.
        """
        gaps = [(b - a, b) for a, b in itertools.pairwise(self.times) if b > moment]
        return max(gaps)[1] - moment if gaps else None


async def read(
    session: aiohttp.ClientSession, body: Mapping[str, Any], arrived: Callable[[int], None]
) -> Stream:
    """Read to the end; `arrived` is told how many tokens came. Never raises for a bad server."""
    stream, done = Stream(), False
    try:
        async with session.post("/v1/completions", json=body) as response:
            if response.status != 200:
                stream.failure = f"HTTP {response.status}"
                return stream
            async for line in response.content:
                payload = payload_of(line)
                if payload == DONE:
                    done = True
                elif payload is not None:
                    arrived(_take(stream, json.loads(payload)))
    except TimeoutError:
        stream.failure = stream.failure or "no token in time"
    except aiohttp.ClientError as error:
        stream.failure = stream.failure or type(error).__name__
    if not done:
        stream.failure = stream.failure or "broken off"
    return stream


def _take(stream: Stream, chunk: Mapping[str, Any]) -> int:
    if chunk.get("error"):
        stream.failure = stream.failure or f"error: {chunk['error'].get('message', '')[:80]}"
    new = [token for choice in chunk.get("choices", ()) for token in choice.get("token_ids") or ()]
    if new:
        stream.times.append(time.monotonic())
        stream.token_ids += new
    return len(new)
