"""Start a server under test, time it to its first token, stop it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from subprocess import Popen
from typing import Any, NamedTuple

import aiohttp
from surestep_cli.bench.load import run_load
from surestep_cli.serve.serving import running
from surestep_common.errors import InvalidRequest

Probe = Callable[[], Awaitable[bool]]

_POLL_S = 0.05
_SOONEST_S = 1.0  # in which no server starts
_PROBE_TIMEOUT_S = 60.0
_TICKS = os.sysconf("SC_CLK_TCK")  # a second


class Start(NamedTuple):
    """Seconds to the first token, and the processor time of each process by then, by its module."""

    start_s: float
    cpu_s: dict[str, float]


@dataclass(frozen=True, slots=True)
class Launched:
    """A command that was started at `started` on the monotonic clock."""

    process: Popen[bytes]
    started: float
    log_path: Path

    async def first_token(self, probe: Probe, timeout_s: float) -> float:
        """Seconds from the start of the command until `probe` succeeds.

        Raises RuntimeError when the command ends before, TimeoutError after `timeout_s`.
        """
        async with asyncio.timeout(timeout_s):
            done = await probe()
            if done and time.monotonic() - self.started < _SOONEST_S:
                raise RuntimeError("a server was there before and answers: stop it")
            while not done:
                if self.process.poll() is not None:
                    raise RuntimeError(
                        f"exit status {self.process.returncode} before the first token; "
                        f"see {self.log_path}"
                    )
                await asyncio.sleep(_POLL_S)
                done = await probe()
        return time.monotonic() - self.started

    async def start(self, probe: Probe, timeout_s: float) -> Start:
        """The same, with the processor time so far."""
        return Start(await self.first_token(probe, timeout_s), cpu_seconds(self.process.pid))


def cpu_seconds(pid: int) -> dict[str, float]:
    """Processor time of a process and of all below it, by the module that each runs.

    It tells more than the clock where others use the machine as well.
    """
    root = Path("/proc") / str(pid)
    argv = root.joinpath("cmdline").read_text().rstrip("\0").split("\0")
    modules = [word for flag, word in pairwise(argv) if flag == "-m"]
    _, _, fields = root.joinpath("stat").read_text().rpartition(")")
    user, system = fields.split()[11:13]
    # A watchdog's arguments name what it watches behind its own module.
    seconds = {modules[0] if modules else "launcher": (int(user) + int(system)) / _TICKS}
    for listed in root.glob("task/*/children"):
        for child in listed.read_text().split():
            with contextlib.suppress(FileNotFoundError):  # it has just ended
                for name, cpu_s in cpu_seconds(int(child)).items():
                    seconds[name] = seconds.get(name, 0.0) + cpu_s
    return seconds


@contextlib.asynccontextmanager
async def launched(command: str, log_path: Path) -> AsyncIterator[Launched]:
    """Run `command` with its output appended to `log_path`; on exit stop it and all it started."""
    started = time.monotonic()
    async with running(shlex.split(command), log_path) as process:
        yield Launched(process, started, log_path)


async def http_first_token(url: str, extra: Mapping[str, Any] | None = None) -> bool:
    """Return whether the server at `url` completes a one-token request, `extra` in its body."""
    try:
        report = await run_load(
            url,
            concurrency=1,
            num_requests=1,
            max_tokens=1,
            prompt_tokens=1,
            extra=extra,
            timeout_s=_PROBE_TIMEOUT_S,
        )
    except (aiohttp.ClientError, TimeoutError, InvalidRequest):
        return False
    return report.num_errors == 0
