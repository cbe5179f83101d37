"""A server, or another command, in a process that ends with the context."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import psutil
import pytest
from support.processes.commands import children
from support.processes.stack import environment
from surestep_cli.serve.serving import running, serving
from surestep_common.errors import Unavailable

STUBBORN = (
    "import signal, subprocess, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
    "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']);"
    "print('up', flush=True); time.sleep(600)"
)


async def test_a_server_that_does_not_start_is_told_with_its_log(tmp_path: Path) -> None:
    log = tmp_path / "folder" / "log"
    nowhere = serving(tmp_path / "nowhere", environ=environment({}), log=log, log_dir=tmp_path)
    with pytest.raises(Unavailable, match=f"^the server did not start; see {log}$"):
        async with nowhere:
            pass
    assert "nowhere" in log.read_text()
    assert children(str(tmp_path), recursive=True) == []


async def test_whoever_gives_up_waiting_leaves_nothing_behind(tmp_path: Path) -> None:
    never = [sys.executable, "-c", "import time; time.sleep(60)"]
    starting = serving(within=never, environ={}, log=tmp_path / "log", log_dir=tmp_path)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(starting.__aenter__(), 0.5)
    assert children(str(tmp_path), recursive=True) == []


async def test_what_ignores_signals_is_killed_with_all_it_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("surestep_cli.serve.serving._STOP_S", 0.1)
    log = tmp_path / "log"
    async with running([sys.executable, "-c", STUBBORN], log) as process:
        async with asyncio.timeout(20):
            while not log.read_text():  # it ignores signals from then on
                await asyncio.sleep(0.02)
        (child,) = psutil.Process(process.pid).children()
    assert process.returncode == -9
    child.wait(20)
