"""A server whose surroundings are taken away, and streams that must not notice."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from support.checkpoints.tiny import make_tiny_checkpoint
from support.faults.run import client_of
from support.faults.server import FaultyServer, serve_for_faults
from support.faults.streams import Answer, Ask, Tally, differences, mix, stream
from support.processes.commands import command

SEED = 20_261_122
Disturb = Callable[[Tally], Awaitable[Awaitable[None] | None]]  # what it returns may come later


@dataclass(frozen=True)
class Abused:
    """A running server, streams, and what they say when nothing happens."""

    server: FaultyServer
    model: Path
    asks: list[Ask]
    expected: list[Answer]

    def survive(self, disturb: Disturb, longest_s: float) -> list[Answer]:
        """All streams again, with `disturb` beside them, which must be through before they are."""
        answers = asyncio.run(self._run(disturb, longest_s))
        assert differences(self.expected, answers) == []
        return answers

    async def _run(self, disturb: Disturb, longest_s: float) -> list[Answer]:
        tally = Tally()
        url = self.server.stack.url
        async with (
            client_of(url) as client,
            asyncio.timeout(longest_s),
            asyncio.TaskGroup() as tasks,
        ):
            streams = [tasks.create_task(stream(client, ask, tally)) for ask in self.asks]
            await tally.reached(len(self.asks))
            left = await disturb(tally)
            ended = sum(task.done() for task in streams)
            assert ended < len(streams), "nobody was disturbed"
            if left is not None:
                await left
        return [task.result() for task in streams]

    @property
    def console(self) -> str:
        """What the launcher has said."""
        return (self.server.stack.logs.parent / "console.log").read_text()

    # -- who is who ----------------------------------------------------------------------------

    def supervisors(self) -> list[Any]:
        """Their statuses."""
        scheduler = self.server.status()["scheduler"]
        return scheduler["supervisors"] if scheduler is not None else []

    def launcher(self) -> psutil.Process:
        """The parent of all."""
        return psutil.Process(self.server.stack.process.pid)

    def children(self, module: str) -> list[psutil.Process]:
        """The launcher's that run a module: one, or none for a moment; workers by rank."""
        return [child for child in self.launcher().children() if module in command(child)]


async def until(condition: Callable[[], object], what: str, timeout_s: float = 60) -> None:
    """Poll a condition of other processes; errors mean that it does not hold yet."""
    try:
        async with asyncio.timeout(timeout_s):
            while not await asyncio.to_thread(_holds, condition):
                await asyncio.sleep(0.02)
    except TimeoutError:
        raise AssertionError(f"{what} did not happen") from None


def _holds(condition: Callable[[], object]) -> bool:
    with contextlib.suppress(Exception):
        return bool(condition())
    return False


@contextlib.contextmanager
def abused(
    folder: Path,
    *flags: str,
    num_streams: int = 6,
    max_tokens: int = 200,
    asks: list[Ask] | None = None,
    expected: list[Answer] | None = None,
    **surroundings: Any,
) -> Iterator[Abused]:
    """A server of a tiny random model in a folder of its own; see `serve_for_faults`.

    Streams are of all kinds unless `asks` are given, and say what they say when nothing happens.
    """
    model = make_tiny_checkpoint(
        folder / "model", "llama", seed=7, tokenizer=True, max_position=2048
    )
    with serve_for_faults(model, folder, *flags, **surroundings) as server:
        asks = asks or mix(random.Random(SEED), num_streams, max_tokens)
        quiet = Abused(server, model, asks, [])
        expected = expected or asyncio.run(quiet._run(_nothing, 90))
        yield Abused(server, model, asks, expected)


async def _nothing(tally: Tally) -> None:
    """No disturbance."""
