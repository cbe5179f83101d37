"""A rank that is put to sleep: its process ends, and the next one has what was held for it."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
from support.fakes.rank import MEMO, WEIGHTS
from support.processes.supervisor import STAND_IN, Supervised, supervising
from surestep_proto import supervisor_pb2 as pb

pytestmark = pytest.mark.rotates(3)


@pytest.fixture(params=["fills", "dozes"])
async def lone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, request: pytest.FixtureRequest
) -> AsyncIterator[Supervised]:
    """Without a standby; one rank loads at once, the other one never ends to load."""
    command = [sys.executable, STAND_IN, str(tmp_path / "stacks"), request.param]
    async with supervising(monkeypatch, command) as running:
        wanted = pb.READY if request.param == "fills" else pb.STARTING
        await running.until(lambda now: now.rank_pid and now.rank_state == wanted)
        yield running


def exists(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


@pytest.mark.parametrize("level", [1, 2])
async def test_it_sleeps_until_it_is_woken(lone: Supervised, level: int) -> None:
    awake = await lone.status()
    held = await lone.sleep(level)
    asleep = await lone.status()
    assert (asleep.rank_state, asleep.rank_pid, asleep.sleep_level) == (pb.ASLEEP, 0, level)
    assert not exists(awake.rank_pid)
    assert held == asleep.held_weight_bytes
    assert held == (len(WEIGHTS) if level == 1 and awake.rank_state == pb.READY else 0)
    assert not await lone.restart()  # there is nothing to restart, and nothing starts of it
    assert (await lone.status()).rank_state == pb.ASLEEP
    await lone.wake()
    again = await lone.until(lambda now: now.rank_state == awake.rank_state and now.rank_pid)
    assert (again.restarts, again.sleep_level, again.failure) == (0, 0, "")
    if awake.rank_state == pb.READY:
        assert (await lone.info()).model_path == MEMO.decode()
        assert again.held_weight_bytes == len(WEIGHTS)


async def test_a_rank_that_dies_on_the_way_is_asleep_too(lone: Supervised) -> None:
    awake = await lone.status()
    os.kill(awake.rank_pid, signal.SIGKILL)
    await asyncio.gather(lone.sleep(1), lone.sleep(2))
    asleep = await lone.status()
    assert (asleep.rank_state, asleep.sleep_level, asleep.held_weight_bytes) == (pb.ASLEEP, 2, 0)
    await lone.wake()
    await lone.until(lambda now: now.rank_state == awake.rank_state and now.rank_pid)


async def test_a_level_that_does_not_exist_changes_nothing(lone: Supervised) -> None:
    with pytest.raises(grpc.aio.AioRpcError, match="no sleep of level 3"):
        await lone.sleep(3)
    now = await lone.status()
    assert now.rank_pid
    assert now.sleep_level == 0
