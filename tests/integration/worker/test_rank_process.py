"""One child process and what is told of its end."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

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
    assert await rank.wait() == (pb.KILLED, "signal SIGKILL", signal.SIGKILL)
    rank.close()
