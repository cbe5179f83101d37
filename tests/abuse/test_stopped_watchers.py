"""Those who watch are stopped, alone and together with what they watch: nobody loses a token."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Iterator

import psutil
import pytest
from support.faults.deprived_server import Abused, abused, until
from support.faults.streams import Tally

pytestmark = [pytest.mark.timeout(240), pytest.mark.rotates(3, turn=0)]
LONGEST_S = 20.0  # that any client may wait for its next token


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Abused]:
    folder = tmp_path_factory.mktemp("stopped")
    with abused(folder, "--tensor-parallel-size", "1", num_streams=4, max_tokens=400) as running:
        yield running


def supervisor(server: Abused) -> psutil.Process:
    return server.children("surestep_worker")[0]


def gateway(server: Abused) -> psutil.Process:
    return server.children("surestep_gateway")[0]


def watchdog(server: Abused) -> psutil.Process:
    return server.children("surestep_scheduler")[0]


def scheduler(server: Abused) -> psutil.Process:
    return watchdog(server).children()[0]


def stop(*who: Callable[[Abused], psutil.Process]) -> Callable[[Abused], None]:
    def now(server: Abused) -> None:
        for process in [find(server) for find in who]:
            process.suspend()

    return now


def stop_supervisor_and_kill_rank(server: Abused) -> None:
    rank = server.supervisors()[0]["rank_pid"]
    supervisor(server).suspend()
    os.kill(rank, signal.SIGKILL)


def stop_all_and_kill_rank(server: Abused) -> None:
    rank = server.supervisors()[0]["rank_pid"]
    stop(supervisor, watchdog, scheduler, gateway)(server)
    os.kill(rank, signal.SIGKILL)


CASES = {
    "supervisor stopped, rank killed": stop_supervisor_and_kill_rank,
    "watchdog and scheduler stopped": stop(watchdog, scheduler),
    "gateway stopped": stop(gateway),
    "everybody stopped, rank killed": stop_all_and_kill_rank,
}


@pytest.mark.parametrize("case", CASES)
def test_streams_go_on(server: Abused, case: str) -> None:
    async def disturb(tally: Tally) -> None:
        await asyncio.to_thread(CASES[case], server)
        await tally.reached(tally.tokens + 20)

    answers = server.survive(disturb, longest_s=90)
    assert max(answer.pause_s for answer in answers) < LONGEST_S
    stack = server.server.stack
    asyncio.run(until(stack.is_ready, "readiness"))
    asyncio.run(until(server.server.has_standbys, "a standby"))


def test_a_watchdog_that_stopped_watching_is_noticed(server: Abused) -> None:
    process, before = watchdog(server), server.console.count("resuming it")
    process.suspend()
    asyncio.run(until(lambda: server.console.count("resuming it") > before, "a line"))
    asyncio.run(until(lambda: process.status() != psutil.STATUS_STOPPED, "its going on"))
    assert watchdog(server).pid == process.pid
