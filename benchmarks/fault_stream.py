"""Stream of completions, with the time of every token, however it ends."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from surestep_cli.api.sessions import stream
from surestep_cli.api.stream import StreamEnded

_FAILURE_CHARACTERS = 80  # in a cell of a table


@dataclass(slots=True)
class Stream:
    """Arrivals with their times (seconds, monotonic); `failure` is empty when all is well."""

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
    received = Stream()
    try:
        await stream(
            session, "/v1/completions", body, lambda chunk: arrived(_take(received, chunk))
        )
    except StreamEnded as end:
        received.failure = str(end)[:_FAILURE_CHARACTERS]
    return received


def _take(received: Stream, chunk: Mapping[str, Any]) -> int:
    new = [token for choice in chunk.get("choices", ()) for token in choice.get("token_ids") or ()]
    if new:
        received.times.append(time.monotonic())
        received.token_ids += new
    return len(new)
