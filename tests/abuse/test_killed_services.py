"""Every service is killed ten times in a minute: the server goes on, and so do the streams."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator

import httpx
import pytest
from support.faults.deprived_server import Abused, abused, until
from support.faults.streams import Tally

pytestmark = [pytest.mark.timeout(300), pytest.mark.rotates(3, turn=2)]
KILLS = 7  # the launcher used to give up at the sixth
KILLS_IN_FULL = 10


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Abused]:
    folder = tmp_path_factory.mktemp("killed")
    ranks = "--tensor-parallel-size", "2"
    with abused(folder, *ranks, num_streams=4, max_tokens=400) as running:
        yield running


@pytest.fixture
def kills(pytestconfig: pytest.Config) -> int:
    return KILLS_IN_FULL if pytestconfig.getoption("--full") else KILLS


async def kill_again_and_again(server: Abused, kills: int, module: str) -> None:
    """SIGKILL to a child of the launcher as soon as there is another process of it."""
    killed: set[int] = set()
    began, wanted = time.monotonic(), kills * len(server.children(module))
    while len(killed) < wanted:
        pids = {process.pid for process in server.children(module)} - killed
        for pid in pids:
            killed.add(pid)
            os.kill(pid, signal.SIGKILL)
        await asyncio.sleep(0.05)
    took_s = time.monotonic() - began
    assert took_s < 60, f"{module}: {took_s:.0f} s"


def test_streams_survive_scheduler_and_workers(server: Abused, kills: int) -> None:
    async def disturb(tally: Tally) -> None:
        async with asyncio.TaskGroup() as tasks:
            for module in ("surestep_scheduler", "surestep_worker"):
                tasks.create_task(kill_again_and_again(server, kills, module))

    before = server.console.count("starting it again")
    server.survive(disturb, longest_s=150)
    assert kills <= server.console.count("starting it again") - before <= 3 * kills


def test_a_rank_and_the_scheduler_are_lost_together(server: Abused) -> None:
    """The rank dies first: nobody tells the other one that their group is no more."""

    async def disturb(tally: Tally) -> None:
        watchdog = server.children("surestep_scheduler")[0]
        scheduler = watchdog.children()[0]
        rank = server.supervisors()[1]["rank_pid"]
        for process in (watchdog, scheduler):
            process.suspend()
        os.kill(rank, signal.SIGKILL)
        for process in (scheduler, watchdog):
            process.kill()
        await tally.reached(tally.tokens + 20)

    server.survive(disturb, longest_s=90)


def test_a_gateway_comes_back_every_time(server: Abused, kills: int) -> None:
    stack = server.server.stack
    asyncio.run(kill_again_and_again(server, kills, "surestep_gateway"))
    asyncio.run(until(stack.is_ready, "readiness"))
    body = {"prompt": "a", "max_tokens": 3}
    answer = httpx.post(f"{stack.url}/v1/completions", json=body, timeout=60)
    assert answer.status_code == 200
