"""Minutes of mixed traffic with a fault every few seconds: nothing fails, no text differs.

`scripts/test tests/promises/recovery/test_soak.py -n 0 --soak-minutes 30` is the long form.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import psutil
import pytest
from openai import AsyncOpenAI
from support.faults.cases import SEED, Fault, cases
from support.faults.run import Served, client_of, run, served_by
from support.faults.server import FaultyServer
from support.faults.streams import (
    KINDS,
    STREAMS,
    Answer,
    Ask,
    Tally,
    ask,
    differences,
    prefix_of,
    stream,
)

_POOL = 32  # different requests
_LEAVE = 0.1  # part of the clients that go away before the end
_LAST_S = 60.0  # for the streams that are open at the end
_GROWTH = 1.3, 64 << 20  # of a process' memory: times, plus bytes


@dataclass
class Soak:
    """Outcome of a soak. Times are on the monotonic clock, in seconds."""

    failures: list[str] = field(default_factory=list)
    requests: int = 0
    left: int = 0
    tokens: int = 0
    faults: list[tuple[float, str]] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)

    def pauses_s(self) -> list[float]:
        """Return how long each stream that was open at a fault waited across it."""
        return sorted(
            waited
            for answer in self.answers
            for at, _ in self.faults
            if (waited := answer.wait_across(at)) is not None
        )

    def summary(self) -> str:
        """Return the outcome in a line."""
        pauses = self.pauses_s() or [0.0]
        p99 = statistics.quantiles(pauses, n=100)[-1] if len(pauses) > 1 else pauses[0]
        kinds = ", ".join(f"{name} {count}" for name, count in self.kinds().most_common())
        return (
            f"{self.requests} requests ({self.left} left early), {self.tokens} tokens, "
            f"{len(self.failures)} failures, {len(self.faults)} faults ({kinds}), pause of streams "
            f"open at a fault: p50 {statistics.median(pauses):.2f} s, p99 {p99:.2f} s, "
            f"longest {pauses[-1]:.2f} s"
        )

    def kinds(self) -> Counter[str]:
        """Faults by name."""
        return Counter(name for _, name in self.faults)


def pool(rng: random.Random) -> list[Ask]:
    """Requests of all kinds, with prompts and answers of any length."""
    kinds = [item for item in KINDS.items() if item[0] != "stop string"] * _POOL
    return [
        ask(kind, options, rng, rng.randint(1, 120), rng.randint(8, 240))
        for kind, options in kinds[:_POOL]
    ]


async def soak(
    served: Served, seconds: float, every_s: tuple[float, float], rng: random.Random
) -> Soak:
    """Run a soak; `failures` of its outcome says what clients should not have seen."""
    asks = pool(rng) + served.asks
    expected = []
    for start in range(0, len(asks), STREAMS):
        expected += await run(served.server.stack.url, asks[start : start + STREAMS])
    seen, until = Soak(), time.monotonic() + seconds
    async with (
        client_of(served.server.stack.url) as client,
        asyncio.timeout(seconds + _LAST_S),
        asyncio.TaskGroup() as tasks,
    ):
        for _ in range(STREAMS):
            own = random.Random(rng.getrandbits(32))
            tasks.create_task(_keep_asking(client, asks, expected, own, until, seen))
        tasks.create_task(_keep_hurting(served, every_s, rng, until, seen))
    return seen


async def _keep_asking(
    client: AsyncOpenAI,
    asks: Sequence[Ask],
    expected: Sequence[Answer],
    rng: random.Random,
    until: float,
    seen: Soak,
) -> None:
    while time.monotonic() < until:
        index = rng.randrange(len(asks))
        leaves_after = rng.randint(1, 20) if rng.random() < _LEAVE else None
        seen.requests += 1
        wrong = await _ask_once(client, asks[index], expected[index], leaves_after, seen)
        seen.failures += [f"{asks[index].kind}: {line}" for line in wrong]


async def _ask_once(
    client: AsyncOpenAI, request: Ask, expected: Answer, leaves_after: int | None, seen: Soak
) -> list[str]:
    """Send a request, broken off after so many tokens if any; return what was wrong with its answer."""
    tally, answer = Tally(), Answer.of(request)
    seen.answers.append(answer)
    reading = asyncio.ensure_future(stream(client, request, tally, answer))
    waits: set[asyncio.Future[Any]] = {reading}
    if leaves_after is not None:
        waits.add(asyncio.ensure_future(tally.reached(leaves_after)))
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    for task in waits:
        task.cancel()
    await asyncio.wait(waits)
    seen.tokens += tally.tokens
    if reading.cancelled():
        seen.left += 1
        return [] if prefix_of(answer, expected) else ["another beginning"]
    if error := reading.exception():
        return [repr(error)]
    return differences([expected], [answer])


async def _keep_hurting(
    served: Served,
    every_s: tuple[float, float],
    rng: random.Random,
    until: float,
    seen: Soak,
) -> None:
    faults = [fault for setup, fault in cases(share=None) if setup == served.setup]
    while True:
        await asyncio.sleep(rng.uniform(*every_s))
        if time.monotonic() > until - every_s[1]:
            return
        fault, rank = rng.choice(faults), rng.randrange(served.setup.ranks)
        await asyncio.to_thread(_hurt, served.server, fault, rank)
        seen.faults.append((time.monotonic(), fault.name))


def _hurt(server: FaultyServer, fault: Fault, rank: int) -> None:
    """Cause a fault once all processes are back: signals need them to go to."""
    server.stack.wait_until(server.stack.is_ready, "readiness")
    fault.inject(server, server.targets(), rank)


def memory(server: FaultyServer) -> dict[str, int]:
    """Bytes that the processes hold that live for long, by name."""
    status = server.status()
    supervisors = status["scheduler"]["supervisors"]
    pids = {"gateway": status["gateway"]["pid"], "scheduler": status["scheduler"]["pid"]}
    pids |= {f"supervisor {each['rank']}": each["pid"] for each in supervisors}
    return {name: psutil.Process(pid).memory_info().rss for name, pid in pids.items()}


def grown(before: dict[str, int], after: dict[str, int]) -> list[str]:
    """Processes that hold more than they may."""
    times, more = _GROWTH
    return [
        f"{name}: {before[name] >> 20} MiB became {after[name] >> 20} MiB"
        for name in before
        if after[name] > times * before[name] + more
    ]


_SHORT_S = 30.0
_SHORT_EVERY_S = 2.0, 4.0
_EVERY_S = 10.0, 20.0


@served_by(["ngram-tp1"])
@pytest.mark.rotates(3)
def test_a_fault_every_few_seconds(
    served: Served,
    request: pytest.FixtureRequest,
    record_property: Callable[[str, object], None],
) -> None:
    minutes: float = request.config.getoption("--soak-minutes")
    long = minutes > 0
    before = memory(served.server)
    seen = asyncio.run(
        soak(
            served,
            60 * minutes if long else _SHORT_S,
            _EVERY_S if long else _SHORT_EVERY_S,
            random.Random(SEED),
        )
    )
    record_property("summary", f"soak: {seen.summary()}")
    assert seen.failures == []
    assert len(seen.faults) >= 3
    served.server.recovered(served.holdings)
    assert grown(before, memory(served.server)) == []
