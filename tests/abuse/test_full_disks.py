"""Disks without a byte left, from the start or in the middle: told, and nobody ends."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest
from support.faults.deprived_server import Abused, abused, until
from support.faults.private_mounts import fill, needs_mounts, within
from support.faults.streams import Tally

pytestmark = [pytest.mark.timeout(240), pytest.mark.rotates(3, turn=1), needs_mounts]
SHM = Path("/dev/shm")


async def lose(server: Abused, tally: Tally, *modules: str) -> None:
    """A rank is killed, and then these services."""
    os.kill(server.supervisors()[0]["rank_pid"], signal.SIGKILL)
    await tally.reached(tally.tokens + 10)
    for module in modules:
        os.kill(server.children(module)[0].pid, signal.SIGKILL)
        await tally.reached(tally.tokens + 10)


def test_a_server_starts_and_goes_on_without_a_byte_of_disk(tmp_path: Path) -> None:
    cache, logs, scratch = tmp_path / "cache", tmp_path / "logs", tmp_path / "scratch"
    places = cache, logs, scratch, SHM
    with abused(
        tmp_path,
        num_streams=4,
        max_tokens=300,
        within=within(dict.fromkeys(places, "64k"), filled=places),
        variables={"XDG_CACHE_HOME": str(cache), "TMPDIR": str(scratch)},
    ) as server:
        told = server.console
        assert "the output of gateway goes to stderr: [Errno 28] No space left on device" in told
        assert "the compiled kernels cannot be kept in" in told
        assert "0 bytes are left on the disk" in told
        server.survive(lambda tally: lose(server, tally, "surestep_scheduler"), longest_s=120)


def test_disks_that_fill_in_the_middle_end_nothing(tmp_path: Path) -> None:
    logs, scratch = tmp_path / "logs", tmp_path / "scratch"
    sizes = {logs: "1m", scratch: "1m", SHM: "1m"}
    with abused(
        tmp_path,
        num_streams=4,
        max_tokens=300,
        within=within(sizes, filled=()),
        variables={"TMPDIR": str(scratch)},
    ) as server:

        async def disturb(tally: Tally) -> None:
            await asyncio.to_thread(fill, server.launcher().pid, *sizes)
            await lose(server, tally, "surestep_worker")

        server.survive(disturb, longest_s=120)
        told = f"logs in {logs}: the disk is full, what the services write now is lost"
        asyncio.run(until(lambda: told in server.console, "a line about the disk"))
