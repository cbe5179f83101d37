"""One child process and what is told of its end."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest
from surestep_proto import engine_pb2 as pb
from surestep_worker.config import WorkerSettings
from surestep_worker.rank_process import RankProcess


async def test_who_asks_for_a_restart_is_not_blamed_for_a_death_unnoticed_so_far() -> None:
    command = [sys.executable, "-c", "input()"]
    rank = await RankProcess.spawn(command, WorkerSettings())
    os.kill(rank.pid, signal.SIGKILL)
    while Path(f"/proc/{rank.pid}/cwd").exists():  # dies, and the event loop cannot notice
        pass
    await rank.end(pb.REQUESTED, "its stream broke")
    assert await rank.wait() == (pb.KILLED, "signal SIGKILL", signal.SIGKILL, True)
    rank.close()


@pytest.mark.parametrize(
    ("number", "outside"),
    [
        (signal.SIGTERM, True),
        (signal.SIGKILL, True),
        (signal.SIGSEGV, False),
        (signal.SIGABRT, False),
    ],
)
async def test_signals_are_told_that_no_process_raises_itself(
    number: signal.Signals, outside: bool
) -> None:
    command = [sys.executable, "-c", "import signal; signal.pause()"]
    rank = await RankProcess.spawn(command, WorkerSettings())
    os.kill(rank.pid, number)
    verdict = await rank.wait()
    rank.close()
    assert (verdict.cause, verdict.signal, verdict.outside) == (pb.KILLED, number, outside)


@pytest.mark.parametrize("stopped", [True, False])
async def test_who_was_stopped_did_not_hang_by_itself(stopped: bool) -> None:
    rank = await RankProcess.spawn([sys.executable, "-c", "input()"], WorkerSettings())
    if stopped:
        os.kill(rank.pid, signal.SIGSTOP)
        while "T (stopped)" not in Path(f"/proc/{rank.pid}/status").read_text():
            pass
    await rank.end(pb.HUNG, "hung")
    assert (await rank.wait()).outside == stopped
    rank.close()
