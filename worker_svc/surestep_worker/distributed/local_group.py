"""`python -m surestep_worker.distributed.local_group`: run ranks of a group on this machine.

It runs `--local-ranks` ranks from `--rank` on, each with its own supervisor and watchdog, as in a
container that has several GPUs. A supervisor that ends is started again; one that ends at once has
wrong settings, and ends the whole group.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from surestep_common.process import (
    die_with_parent,
    dump_stacks_on_signal,
    end_on_sigterm,
    python_module,
)

if TYPE_CHECKING:
    from surestep_worker.config import WorkerSettings

logger = logging.getLogger(__name__)

_EARLY_S = 10.0


class LocalGroup:
    """Keeps one process running for each command."""

    def __init__(self, commands: Sequence[Sequence[str]], early_s: float = _EARLY_S) -> None:
        """A process that ends within `early_s` seconds is not started again."""
        self._commands = commands
        self._early_s = early_s
        self._running: set[asyncio.subprocess.Process] = set()
        self._stopping = False

    async def run(self) -> int:
        """Run until `stop`, or until one ends early. Returns the worst exit status: 128 + N for
        signal N."""
        async with asyncio.TaskGroup() as tasks:
            keeping = [tasks.create_task(self._keep_running(command)) for command in self._commands]
        return max(task.result() for task in keeping)

    def stop(self) -> None:
        """Pass SIGTERM on to all processes."""
        self._stopping = True
        for process in self._running:
            _terminate(process)

    async def _keep_running(self, command: Sequence[str]) -> int:
        while True:
            began = time.monotonic()
            status = await self._run_once(command)
            if self._stopping:
                return status
            lived_s = time.monotonic() - began
            logger.error("%s ended with status %d after %.1f s", command[-1], status, lived_s)
            if lived_s < self._early_s:
                self.stop()
                return status or 1

    async def _run_once(self, command: Sequence[str]) -> int:
        process = await asyncio.create_subprocess_exec(*command, preexec_fn=die_with_parent)
        self._running.add(process)
        if self._stopping:  # stopped before it was recorded
            _terminate(process)
        try:
            code = await process.wait()
        finally:
            self._running.discard(process)
        return code if code >= 0 else 128 - code


def _terminate(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.terminate()


def commands(settings: WorkerSettings) -> list[list[str]]:
    """Return the watchdogs' commands; all other settings are passed in the environment."""
    first = settings.rank
    ranks = range(first, first + settings.ranks_here)
    return [_watchdog_command(settings.model_copy(update={"rank": rank})) for rank in ranks]


def _watchdog_command(settings: WorkerSettings) -> list[str]:
    worker = python_module("surestep_worker", f"--rank={settings.rank}")
    watchdog = python_module("surestep_common.watchdog", settings.supervisor_address)
    return [*watchdog, "--", *worker]


async def run_group(settings: WorkerSettings) -> int:
    """Run until SIGTERM or SIGINT. Returns an exit status."""
    group = LocalGroup(commands(settings))
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, group.stop)
    return await group.run()


def main() -> int:
    end_on_sigterm()
    from surestep_common import log  # slow to import

    from surestep_worker.config import WorkerSettings

    dump_stacks_on_signal()
    settings = WorkerSettings.load()
    log.configure("group", level=settings.log_level, as_json=settings.log_json)
    return asyncio.run(run_group(settings))


if __name__ == "__main__":
    sys.exit(main())
