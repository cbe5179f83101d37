"""No socket between a supervisor and a process of its rank stays open when the process is gone."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from support.processes.supervisor import STAND_IN, supervising


@pytest.fixture
def command(tmp_path: Path) -> list[str]:
    return [sys.executable, STAND_IN, str(tmp_path / "stacks")]


@pytest.fixture
def dropped() -> Iterator[list[warnings.WarningMessage]]:
    """What is collected before it was closed."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", ResourceWarning)
        yield said


@pytest.mark.rotates(1)
async def test_a_standby_that_dies_soon_after_its_rank_is_closed(
    monkeypatch: pytest.MonkeyPatch, command: list[str], dropped: list[warnings.WarningMessage]
) -> None:
    """While nobody watches it, for the next rank is some time away."""
    monkeypatch.setattr("surestep_worker.process.standbys.BACKOFF_S", (1.0,))
    async with supervising(monkeypatch, command, standby=True) as running:
        first = await running.until(lambda now: now.standby_pid)
        os.kill(first.rank_pid, signal.SIGKILL)
        await running.until(lambda now: now.rank_pid == 0)
        os.kill(first.standby_pid, signal.SIGKILL)
        after = await running.until(lambda now: now.rank_pid)
        assert after.rank_pid != first.standby_pid
        gc.collect()
    assert [str(warning.message) for warning in dropped] == []


@pytest.mark.rotates(1)
async def test_a_supervisor_that_is_stopped_again_while_it_stops_closes_all(
    monkeypatch: pytest.MonkeyPatch, command: list[str], dropped: list[warnings.WarningMessage]
) -> None:
    async with supervising(monkeypatch, command) as running:
        now = await running.ready(restarts=0)
        os.kill(now.rank_pid, signal.SIGSTOP)  # so that it is waited for
        stopping = asyncio.ensure_future(running.stop())
        for _ in range(50):
            await asyncio.sleep(0)
    await stopping
    assert not psutil.pid_exists(now.rank_pid)
    del running, stopping
    gc.collect()
    assert [str(warning.message) for warning in dropped] == []
