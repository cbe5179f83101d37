"""Services as process 1 of a container, told to stop before they have begun."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from functools import cache
from pathlib import Path

import psutil
import pytest
from support.checkpoints import tiny_tokenizer
from support.processes.ports import free_port

_FIRST = ("unshare", "--pid", "--fork", "--kill-child")  # what follows is process 1
_SOON_S = 10.0  # far less than a grace period, and enough for a busy machine


@cache
def _allowed() -> bool:
    return subprocess.run([*_FIRST, "true"], capture_output=True, check=False).returncode == 0


needs_namespaces = pytest.mark.skipif(
    "not __import__('test_told_to_stop')._allowed()", reason="no namespaces of processes"
)


async def _process_one(launcher: asyncio.subprocess.Process) -> psutil.Process:
    async with asyncio.timeout(30):
        while not (children := psutil.Process(launcher.pid).children()):
            await asyncio.sleep(0)
        return children[0]


def _hears(process: psutil.Process, number: int) -> bool:
    """Whether it has a handler for the signal; without one process 1 does not get it."""
    status = Path(f"/proc/{process.pid}/status").read_text()
    caught = status.partition("SigCgt:")[2].split()[0]
    return bool(int(caught, 16) >> (number - 1) & 1)


@contextlib.asynccontextmanager
async def _started(*command: str, **environ: str) -> AsyncIterator[asyncio.subprocess.Process]:
    inherited = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    launcher = await asyncio.create_subprocess_exec(
        *_FIRST, sys.executable, "-m", *command, env=inherited | environ, stderr=subprocess.DEVNULL
    )
    try:
        yield launcher
    finally:
        if launcher.returncode is None:
            launcher.kill()
        await launcher.wait()


@needs_namespaces
@pytest.mark.parametrize("later_s", [0.0, 0.05, 0.2, 0.5, 1.0])
@pytest.mark.parametrize(
    ("command", "heavy"),
    [
        (("surestep_gateway",), "uvloop"),
        (("surestep_worker.distributed.local_group",), "pydantic_core"),
        (("surestep_common.watchdog", "127.0.0.1:1", "--", "sleep", "60"), "cygrpc"),
    ],
    ids=lambda value: value[0].rpartition(".")[2] if isinstance(value, tuple) else "",
)
@pytest.mark.rotates(3)
async def test_sigterm_ends_it_whenever_it_comes(
    tmp_path: Path, command: tuple[str, ...], heavy: str, later_s: float
) -> None:
    model = tiny_tokenizer.save(tmp_path / "tiny")
    environ = {"SURESTEP_MODEL": str(model), "SURESTEP_PORT": str(free_port())}
    async with _started(*command, **environ) as launcher:
        process = await _process_one(launcher)
        async with asyncio.timeout(30):
            while True:
                loaded = Path(f"/proc/{process.pid}/maps").read_text()
                if _hears(process, signal.SIGTERM):
                    break
                assert heavy not in loaded, "what takes long is imported before signals are heard"
                await asyncio.sleep(0)
        await asyncio.sleep(later_s)
        process.terminate()
        async with asyncio.timeout(_SOON_S):
            assert await launcher.wait() in (0, 128 + signal.SIGTERM)
