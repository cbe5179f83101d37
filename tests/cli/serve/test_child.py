"""One child of the launcher: restarts, logs, ends."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import sys
import time
from dataclasses import replace

import psutil
import pytest
from support.processes.launcher import ENVIRON, SCRIPT, Bench
from surestep_cli.serve.child import BackOff, Child


@pytest.mark.rotates(1)
async def test_a_service_that_keeps_dying_ends_nothing(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    child = bench.child("scheduler", "fail")
    child.proven = True
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(child.keep())
        await bench.until(lambda: bench.lines().count("start scheduler") == 6)
        await child.stop(1)
    assert [message.split(";")[0] for message in caplog.messages] == [
        "scheduler ended (exit status 3)"
    ] * len(caplog.messages)
    assert 5 <= len(caplog.messages) <= 6


def test_pauses_grow_and_are_short_again_after_good_service() -> None:
    back_off = BackOff()
    pauses = [round(back_off.pause_s(lived_s=1.0), 1) for _ in range(9)]
    assert pauses == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0, 5.0]
    assert back_off.longest
    assert back_off.pause_s(lived_s=60.0) == 0.1
    assert not back_off.longest


async def test_a_flapping_service_is_told_of_once_a_minute(
    bench: Bench, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("surestep_cli.serve.child._LONGEST_PAUSE_S", 0.1)
    child = bench.child("talker", "fail")
    child.proven = True
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(child.keep())
        await bench.until(lambda: bench.lines().count("start talker") == 8)
        await child.stop(1)
    (message,) = caplog.messages
    assert "logged once in 60 s" in message
    assert message.endswith("its last words: bad settings")


async def test_a_removed_log_folder_is_made_again(bench: Bench) -> None:
    log = bench.folder / "logs" / "talker.log"
    child = Child(replace(bench.child("talker", "fail").command, log_path=log))
    child.proven = True
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(child.keep())
        await bench.until(lambda: log.exists() and "bad settings" in log.read_text())
        shutil.rmtree(log.parent)
        await bench.until(lambda: log.exists() and "bad settings" in log.read_text())
        await child.stop(1)


async def test_where_no_log_can_be_written_it_is_told_and_nothing_ends(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    file = bench.folder / "file"
    file.touch()
    command = bench.child("talker", "fail").command
    child = Child(replace(command, log_path=file / "talker.log"))
    child.proven = True
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(child.keep())
        await bench.until(lambda: len(bench.lines()) == 3)
        await child.stop(1)
    told = [message for message in caplog.messages if "goes to stderr" in message]
    assert told == [f"the output of talker goes to stderr: [Errno 17] File exists: '{file}'"]


async def test_a_command_that_cannot_be_started_is_tried_again(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    child = bench.child("talker", "fail")
    child = Child(replace(child.command, argv=(str(bench.folder / "nothing"),)))
    child.proven = True
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(child.keep())
        await bench.until(lambda: len(caplog.messages) == 3)
        await child.stop(1)
    assert "cannot be started: [Errno 2]" in caplog.messages[0]


async def test_a_deaf_service_is_killed_after_its_grace(bench: Bench) -> None:
    child = bench.child("gateway", "deaf")
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(child.keep())
        await bench.until(lambda: bench.lines() == ["start gateway"])
        began = time.monotonic()
        await child.stop(0.3)
    assert 0.3 <= time.monotonic() - began < 5


def test_no_orphan_outlives_a_killed_launcher(bench: Bench) -> None:
    code = (
        "import asyncio, sys; from pathlib import Path; sys.path[:0] = {path!r};"
        "from surestep_cli.serve.child import Child, Command;"
        "asyncio.run(Child(Command(name='x', argv={argv!r}, environ={environ!r},"
        " log_path=Path({log!r}))).keep())"
    )
    argv = (sys.executable, SCRIPT, "deaf", "x", str(bench.journal))
    log = str(bench.folder / "x.log")
    parent = subprocess.Popen(
        [sys.executable, "-c", code.format(path=sys.path, argv=argv, environ=ENVIRON, log=log)]
    )
    try:
        deadline = time.monotonic() + 20
        while bench.lines() != ["start x"]:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        (child,) = psutil.Process(parent.pid).children()
    finally:
        parent.kill()
        parent.wait()
    psutil.wait_procs([child], timeout=10)
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE
