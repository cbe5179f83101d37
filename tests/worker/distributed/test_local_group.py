"""Several ranks of one machine under one process, as in a container."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest
from surestep_worker.config import WorkerSettings
from surestep_worker.distributed.local_group import LocalGroup, commands

OTHERS: set[psutil.Process] = set()  # children of this process for other tests
SLEEPS = [sys.executable, "-c", "import signal; signal.pause()"]


@pytest.fixture(autouse=True)
def others() -> None:
    OTHERS.clear()
    OTHERS.update(psutil.Process().children())


def fails(status: int) -> list[str]:
    return [sys.executable, "-c", f"raise SystemExit({status})"]


async def children(count: int, but: psutil.Process | None = None) -> list[psutil.Process]:
    """As soon as there are so many, besides one."""
    async with asyncio.timeout(20):
        while True:
            found = [one for one in psutil.Process().children() if one not in {but, *OTHERS}]
            if len(found) == count:
                return found
            await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def running(group: LocalGroup) -> AsyncIterator[asyncio.Task[int]]:
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(group.run())
        try:
            yield task
        finally:
            group.stop()


async def test_who_ends_late_is_started_again_and_nobody_else() -> None:
    group = LocalGroup([SLEEPS, SLEEPS], early_s=0)
    async with running(group) as task:
        first, second = await children(2)
        first.kill()
        again = await children(2, but=first)
        assert second in again
        assert not task.done()
    assert task.result() == 128 + signal.SIGTERM


async def test_who_ends_at_once_ends_all_with_its_status() -> None:
    group = LocalGroup([SLEEPS, fails(2)], early_s=60)
    async with asyncio.timeout(30), running(group) as task:
        assert await task >= 2
    assert await children(0) == []


async def test_an_end_without_an_error_is_one() -> None:
    async with asyncio.timeout(30), running(LocalGroup([fails(0)], early_s=60)) as task:
        assert await task == 1


def test_each_rank_has_a_watchdog_of_its_own() -> None:
    settings = WorkerSettings(
        rank=4,
        local_ranks=2,
        tensor_parallel_size=8,
        tp_master="other:1",
        supervisor_listen="0.0.0.0:100",
    )
    first, second = (" ".join(command) for command in commands(settings))
    assert "watchdog 0.0.0.0:104 --" in first
    assert first.endswith("surestep_worker --rank=4")
    assert "watchdog 0.0.0.0:105 --" in second
    assert second.endswith("surestep_worker --rank=5")
    alone = WorkerSettings(tensor_parallel_size=3)
    assert len(commands(alone)) == 3  # they meet on loopback, so all are here


@pytest.mark.slow
async def test_a_wrong_setting_ends_it_with_a_line(tmp_path: Path) -> None:
    process = await asyncio.create_subprocess_exec(
        *(
            sys.executable,
            "-m",
            "surestep_worker.distributed.local_group",
            "--tensor-parallel-size=2",
        ),
        f"--generation-config={tmp_path}",
        "--max-model-len=1",
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stderr is not None
    said = await process.stderr.read()
    assert await process.wait() == 2
    assert b"max_model_len" in said
