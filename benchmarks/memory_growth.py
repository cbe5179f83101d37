"""Resident memory of a running server's processes, every so many requests.

python benchmarks/memory_growth.py [--url URL] [--requests 2000] [--every 200] [--clients 8]

Caches are allocated at the start, and the system gives them a page of memory when it is written for
the first time. Blocks are used in turn while there are free ones, so the resident memory of a rank
grows until each was used once. What it has asked the system for, "data", does not: a leak would
show there.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from collections.abc import Iterator
from typing import Any

import aiohttp
import psutil

_MIB = 1 << 20
_WORDS = 120  # of a prompt


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--every", type=int, default=200, help="requests between two lines")
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--seed", type=int, default=0, help="of the prompts")
    return parser.parse_args(argv)


def pids_of(status: dict[str, Any]) -> dict[str, int]:
    """Return the process of each service, by its name in the table."""
    gateway, [first, *_] = status["gateway"], status["schedulers"]
    scheduler = first["status"]
    supervisors = scheduler["supervisors"]
    return {
        "gateway": gateway["pid"],
        "scheduler": scheduler["pid"],
        **{f"supervisor {each['rank']}": each["pid"] for each in supervisors},
        **{f"rank {each['rank']}": each["rank_pid"] for each in supervisors},
    }


def row(pids: dict[str, int]) -> Iterator[str]:
    """Yield the cells of a line."""
    for name, pid in pids.items():
        memory = psutil.Process(pid).memory_info()
        yield f"{memory.rss / _MIB:.0f}"
        if name.startswith("rank"):
            yield f"{memory.data / _MIB:.0f}"


async def measure(options: argparse.Namespace) -> None:
    """Send the requests and print a line at the start and after every so many of them."""
    rng, began = random.Random(options.seed), time.monotonic()
    async with aiohttp.ClientSession(options.url) as session:
        async with session.get("/v1/models") as reply:
            model = (await reply.json())["data"][0]["id"]
        async with session.get("/status") as reply:
            pids = pids_of(await reply.json())
        names = (f"{name} | its data" if name.startswith("rank") else name for name in pids)
        print(" | ".join(["requests", "s", *names]))
        for sent in range(0, options.requests + 1, options.every):
            seconds = time.monotonic() - began
            print(" | ".join([str(sent), f"{seconds:.0f}", *row(pids)]), flush=True)
            if sent < options.requests:
                turns = iter(range(options.every))
                asking = (_ask(session, model, turns, options, rng) for _ in range(options.clients))
                await asyncio.gather(*asking)


async def _ask(
    session: aiohttp.ClientSession,
    model: str,
    turns: Iterator[int],
    options: argparse.Namespace,
    rng: random.Random,
) -> None:
    for _ in turns:
        prompt = " ".join(str(rng.randrange(1000)) for _ in range(_WORDS))
        body = {"model": model, "prompt": prompt, "max_tokens": options.max_tokens}
        async with session.post("/v1/completions", json=body) as reply:
            reply.raise_for_status()
            await reply.read()


if __name__ == "__main__":
    asyncio.run(measure(parse()))
