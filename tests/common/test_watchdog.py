"""The watchdog with real processes: what hangs is ended, what works is left alone."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from support.fakes import hanging_service
from support.processes.commands import command
from support.processes.ports import free_address
from surestep_common.notify import Listener
from surestep_common.watchdog import STANDBY

pytestmark = pytest.mark.rotates(2)


@dataclass
class Watched:
    """A watchdog and its child."""

    watchdog: asyncio.subprocess.Process
    log: Path
    address: str

    @property
    def child(self) -> psutil.Process:
        (child,) = psutil.Process(self.watchdog.pid).children()
        return child

    async def new_standby(self, *known: psutil.Process) -> psutil.Process:
        """A child that waits for its turn, or has had it, and is none of these."""
        async with asyncio.timeout(20):
            while True:
                for child in psutil.Process(self.watchdog.pid).children():
                    if child not in known and STANDBY in command(child):
                        return child
                await asyncio.sleep(0.05)

    async def logs(self, words: str) -> None:
        """Wait for a line of its log."""
        async with asyncio.timeout(30):
            while words not in self.log.read_text():
                await asyncio.sleep(0.05)

    async def status(self) -> int:
        """Exit status of the watchdog."""
        async with asyncio.timeout(20):
            return await self.watchdog.wait()


@contextlib.asynccontextmanager
async def watching(
    log: Path,
    address: str,
    *command: str,
    flags: Sequence[str] = (),
    environ: Mapping[str, str] | None = None,
) -> AsyncIterator[Watched]:
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)} | dict(environ or {})
    with log.open("wb") as file:
        watchdog = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "surestep_common.watchdog", *flags, address, "--", *command),
            env=environ,
            stdout=file,
            stderr=file,
        )
    try:
        yield Watched(watchdog, log, address)
    finally:
        if watchdog.returncode is None:
            watchdog.kill()
        await watchdog.wait()


@pytest.fixture
async def watched(tmp_path: Path) -> AsyncIterator[Watched]:
    async with serving(tmp_path / "log") as service:
        yield service


@contextlib.asynccontextmanager
async def serving(log: Path, *flags: str) -> AsyncIterator[Watched]:
    """A service that has answered."""
    address = free_address()
    command = (sys.executable, hanging_service.__file__, address.rpartition(":")[2])
    async with watching(log, address, *command, flags=flags) as service:
        await service.logs("watching pid")
        yield service


async def test_a_stopped_process_is_told_to_go_on(watched: Watched) -> None:
    child = watched.child
    for rounds in (1, 2):
        began = time.monotonic()
        child.suspend()
        async with asyncio.timeout(20):
            while watched.log.read_text().count("is stopped: resuming it") < rounds:
                await asyncio.sleep(0.05)
        assert time.monotonic() - began < 6
        assert child.status() != psutil.STATUS_STOPPED
    watched.watchdog.send_signal(signal.SIGTERM)
    assert await watched.status() == 7, "it was killed"


async def test_signs_of_life_go_to_whoever_wants_them(tmp_path: Path) -> None:
    listener, address = Listener(), free_address()
    command = (sys.executable, hanging_service.__file__, address.rpartition(":")[2])
    environ = {"NOTIFY_SOCKET": listener.address}
    async with watching(tmp_path / "log", address, *command, environ=environ) as service:
        await heard(listener)
        watchdog = psutil.Process(service.watchdog.pid)
        watchdog.suspend()
        while listener.heard():  # what was on its way
            await asyncio.sleep(0.5)
        await asyncio.sleep(1.5)
        assert not listener.heard()
        watchdog.resume()
        await heard(listener)
    listener.close()


async def heard(listener: Listener) -> None:
    async with asyncio.timeout(20):
        while not listener.heard():
            await asyncio.sleep(0.05)


async def test_a_blocked_event_loop_shows_its_stacks(watched: Watched) -> None:
    os.kill(watched.child.pid, signal.SIGUSR2)
    assert await watched.status() == 128 + signal.SIGKILL
    assert "in block_here" in watched.log.read_text()


async def test_a_short_pause_is_none_of_its_business(watched: Watched) -> None:
    child = watched.child
    child.suspend()
    await asyncio.sleep(1.0)
    child.resume()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(4):
            await watched.watchdog.wait()
    assert child.is_running()


async def test_signals_and_exit_status_pass_through(watched: Watched) -> None:
    watched.watchdog.send_signal(signal.SIGTERM)
    assert await watched.status() == 7
    assert "does not answer" not in watched.log.read_text()


async def test_the_child_dies_with_it(watched: Watched) -> None:
    child = watched.child
    watched.watchdog.kill()
    await watched.status()
    psutil.wait_procs([child], timeout=10)
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE


@pytest.mark.parametrize(("code", "status"), [("exit(3)", 3), ("exit(0)", 0)])
async def test_a_child_that_never_serves(tmp_path: Path, code: str, status: int) -> None:
    async with watching(
        tmp_path / "log", free_address(), sys.executable, "-c", f"import sys; sys.{code}"
    ) as service:
        assert await service.status() == status


async def test_a_standby_takes_over_again_and_again(tmp_path: Path) -> None:
    async with serving(tmp_path / "log", STANDBY) as service:
        standby, known = await service.new_standby(), list[psutil.Process]()
        (first,) = set(psutil.Process(service.watchdog.pid).children()) - {standby}
        standby.kill()  # which costs nothing
        for end in (signal.SIGKILL, signal.SIGTERM):
            known.append(standby)
            standby = await service.new_standby(*known)
            first.send_signal(end)
            await service.logs(f"watching pid {standby.pid}")
            first = standby
        service.watchdog.send_signal(signal.SIGTERM)
        assert await service.status() == 7
    psutil.wait_procs([standby], timeout=10)
    assert not standby.is_running()


async def test_a_standby_ends_with_its_watchdog(tmp_path: Path) -> None:
    async with serving(tmp_path / "log", STANDBY) as service:
        standby = await service.new_standby()
        service.watchdog.kill()
        await service.status()
    psutil.wait_procs([standby], timeout=10)
    assert not standby.is_running() or standby.status() == psutil.STATUS_ZOMBIE


async def test_usage(tmp_path: Path) -> None:
    async with watching(tmp_path / "log", "nowhere") as service:
        assert await service.status() == 2
    assert "usage:" in service.log.read_text()
