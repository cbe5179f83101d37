"""One child process and what is told of its end."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from surestep_proto import supervisor_pb2 as pb
from surestep_worker.config import WorkerSettings
from surestep_worker.process import child
from surestep_worker.process.rank_process import RankProcess


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


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"device": "cuda"}, [":16:8", "1"]),
        ({"device": "cuda", "linear_backend": "torch"}, [None, None]),
        ({"device": "cpu"}, [None, None]),
    ],
)
async def test_cublas_of_a_rank_that_may_use_it_within_the_promise_has_no_workspace(
    given: dict[str, Any], told: list[str | None], tmp_path: Path
) -> None:
    names = "CUBLAS_WORKSPACE_CONFIG", "CUBLASLT_WORKSPACE_SIZE"
    wrote = tmp_path / "environ"
    program = f"import json, os; json.dump([os.environ.get(n) for n in {names}], open({str(wrote)!r}, 'w'))"
    rank = await RankProcess.spawn([sys.executable, "-c", program], WorkerSettings(**given))
    await rank.wait()
    rank.close()
    assert json.loads(wrote.read_text()) == told


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


async def test_a_rank_is_started_early_only_where_that_is_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(child, "rank_command", lambda: [sys.executable, "-c", "input()"])
    assert child.start_early(["supervisor", "--rank", "0"]) is None
    arguments = ["supervisor", child.START_RANK, "--rank", "0"]
    started = child.start_early(arguments)
    assert started is not None
    assert arguments == ["supervisor", "--rank", "0"]
    rank = RankProcess(started)
    assert rank.alive
    rank.close()  # the end of its input
    assert (await rank.wait()).reason == "exit code 1"
    assert not rank.alive
