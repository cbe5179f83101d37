"""Measure what a client's load costs another client: a JSON line per question, over HTTP alone.

python benchmarks/fairness.py --command "surestep serve MODEL --port 8000"
python benchmarks/fairness.py --url http://127.0.0.1:8000 --questions neighbour

* neighbour: a prompt of 3 tokens, alone and beside 200 long prompts of another client.
* words: 128 sequences with 1024 bad_words of 256 characters each, beside a stream of another
  client: what the request gets, the stream's longest pause, the longest wait for /health, and how
  many times the scheduler was replaced.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import io
import itertools
import json
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import machine
import uvloop
from fault_stream import Stream, read
from launch import http_first_token, launched

BETWEEN_S = 1.0  # short prompts of the neighbour
START_S = 300.0
ALONE = 5  # short prompts whose median is the wait alone

Figures = dict[str, Any]


def body(user: str, number: int, length: int, max_tokens: int, **more: Any) -> Figures:
    """A streamed completion whose prompt nobody else has."""
    prompt = [3 + number % 300, *((7 * number + i * i) % 300 + 3 for i in range(length - 1))]
    return {
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
        "user": user,
    } | more


def nothing(_: int) -> None:
    """Nobody counts."""


class Counter:
    """Tokens that a client got."""

    def __init__(self) -> None:
        self.tokens = 0

    def __call__(self, more: int) -> None:
        self.tokens += more


async def first_token_s(session: aiohttp.ClientSession, number: int) -> float | None:
    """Wait for the first token of a short prompt; None when it failed."""
    began = time.monotonic()
    stream = await read(session, body("neighbour", number, 3, 1), nothing)
    return stream.times[0] - began if stream.times and not stream.failure else None


@contextlib.asynccontextmanager
async def load(session: aiohttp.ClientSession, args: argparse.Namespace) -> AsyncIterator[Counter]:
    """Long prompts of one client, all at once; a new one for each that ends. Ends them all."""
    counter, numbers = Counter(), itertools.count(1000)

    async def insist() -> None:
        while True:
            request = body("greedy", next(numbers), args.prompt_tokens, args.max_tokens)
            if (await read(session, request, counter)).failure:
                await asyncio.sleep(0.5)

    tasks = [asyncio.ensure_future(insist()) for _ in range(args.prompts)]
    try:
        yield counter
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def neighbour(session: aiohttp.ClientSession, args: argparse.Namespace) -> Figures:
    """Waits for the first token of short prompts, and what the load itself gets."""
    alone = [await first_token_s(session, number) for number in range(ALONE)]
    async with load(session, args) as counter:
        await asyncio.sleep(args.settle)
        before, began = counter.tokens, time.monotonic()
        await asyncio.sleep(args.seconds)
        undisturbed = (counter.tokens - before) / (time.monotonic() - began)
    await asyncio.sleep(args.settle)
    waits: list[float | None] = []
    async with load(session, args) as counter:
        await asyncio.sleep(args.settle)
        before, began = counter.tokens, time.monotonic()
        while time.monotonic() - began < args.seconds:
            waits.append(await first_token_s(session, 100 + len(waits)))
            await asyncio.sleep(BETWEEN_S)
        disturbed = (counter.tokens - before) / (time.monotonic() - began)
    served = [wait for wait in waits if wait is not None]
    return {
        "alone_s": _median(alone),
        "beside_s": _median(waits),
        "beside_longest_s": round(max(served), 3) if served else None,
        "asked": len(waits),
        "refused": len(waits) - len(served),
        "load_tok_s_alone": round(undisturbed, 1),
        "load_tok_s_beside": round(disturbed, 1),
    }


async def words(session: aiohttp.ClientSession, args: argparse.Namespace) -> Figures:
    """The request that asks for most work in fewest bytes, beside somebody's stream."""
    long = ["".join(chr(0x1D100 + (i + j) % 200) for j in range(256)) for i in range(1024)]
    heavy = body("greedy", 1, 5, 4, n=128, bad_words=long, stream=False)
    raw, kind = io.BytesIO(json.dumps(heavy).encode()), {"Content-Type": "application/json"}
    pids, waits = [await _scheduler_pid(session)], list[float]()
    stream = asyncio.ensure_future(read(session, body("neighbour", 2, 5, args.tokens), nothing))
    probe = asyncio.ensure_future(_probe(session, waits, pids))
    await asyncio.sleep(1)
    began = time.monotonic()
    try:
        async with session.post("/v1/completions", data=raw, headers=kind) as response:
            answer: Any = response.status
            await response.read()
    except (aiohttp.ClientError, TimeoutError) as error:
        answer = type(error).__name__
    answered_s = time.monotonic() - began
    other: Stream = await stream
    await asyncio.sleep(1)
    probe.cancel()
    await asyncio.gather(probe, return_exceptions=True)
    pauses = [later - earlier for earlier, later in itertools.pairwise(other.times)]
    known = [pid for pid in pids if pid is not None]
    return {
        "answer": answer,
        "answered_s": round(answered_s, 2),
        "stream": other.failure or "whole",
        "stream_tokens": len(other.token_ids),
        "stream_longest_pause_s": round(max(pauses, default=0.0), 2),
        "health_longest_s": round(max(waits, default=0.0), 3),
        "schedulers_replaced": len({*known}) - 1 if known else None,
    }


async def _probe(
    session: aiohttp.ClientSession, waits: list[float], pids: list[int | None]
) -> None:
    """Ask for /health ten times a second."""
    while True:
        began = time.monotonic()
        with contextlib.suppress(aiohttp.ClientError, TimeoutError):
            async with session.get("/health") as response:
                await response.read()
        waits.append(time.monotonic() - began)
        pids.append(await _scheduler_pid(session))
        await asyncio.sleep(0.1)


async def _scheduler_pid(session: aiohttp.ClientSession) -> int | None:
    """Return the pid of Surestep's scheduler; None for other servers, and while there is none."""
    with contextlib.suppress(aiohttp.ClientError, TimeoutError, KeyError, TypeError, ValueError):
        async with session.get("/status") as response:
            document: Any = await response.json()
        pid: int = document["schedulers"][0]["status"]["pid"]
        return pid
    return None


QUESTIONS: dict[str, Callable[[aiohttp.ClientSession, argparse.Namespace], Awaitable[Figures]]] = {
    "neighbour": neighbour,
    "words": words,
}


def _median(waits: list[float | None]) -> float | None:
    served = [wait for wait in waits if wait is not None]
    return round(statistics.median(served), 3) if served else None


async def measure(args: argparse.Namespace) -> None:
    """Print a line per question; the server is started anew for each, if it is started at all."""
    for question in args.questions:
        async with contextlib.AsyncExitStack() as stack:
            if args.command:
                log = Path(tempfile.gettempdir()) / "surestep-fairness.log"
                server = await stack.enter_async_context(launched(args.command, log))
                await server.first_token(lambda: http_first_token(args.url), START_S)
            connector = aiohttp.TCPConnector(limit=0)
            timeout = aiohttp.ClientTimeout(total=None, sock_read=args.patience)
            session = aiohttp.ClientSession(args.url, connector=connector, timeout=timeout)
            await stack.enter_async_context(session)
            figures = await QUESTIONS[question](session, args)
        print(json.dumps({"question": question, **figures, **machine.describe()}), flush=True)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--command", help="starts the server; without it one must run at --url")
    parser.add_argument("--questions", nargs="+", choices=QUESTIONS, default=list(QUESTIONS))
    parser.add_argument("--prompts", type=int, default=200, help="long prompts open at once")
    parser.add_argument("--prompt-tokens", type=int, default=1500, help="of each of them")
    parser.add_argument("--max-tokens", type=int, default=50, help="of their answers")
    parser.add_argument("--tokens", type=int, default=400, help="of the stream beside the words")
    parser.add_argument("--seconds", type=float, default=60, help="of measuring under load")
    parser.add_argument("--settle", type=float, default=5, help="seconds before that")
    parser.add_argument("--patience", type=float, default=180, help="seconds to wait for a byte")
    return parser.parse_args(argv)


if __name__ == "__main__":
    uvloop.run(measure(parse()))
