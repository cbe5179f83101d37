"""One service process in the launcher's care."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from surestep_common.process import die_with_parent

logger = logging.getLogger(__name__)

_BACKOFF_S = (0.1, 0.5, 1.0, 2.0, 5.0)  # by restarts within the window
_WINDOW_S = 60.0
_TAIL_LINES = 15


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """How to start a service. Its output goes to the end of `log_path`."""

    name: str
    argv: tuple[str, ...]
    environ: Mapping[str, str]
    log_path: Path


class ChildFailedError(Exception):
    """A service ended and starting it again is no use; the message shows the end of its log."""


class Child:
    """Runs a command, and runs it again when it ends by itself.

    The restarts are bounded: as many within a minute as there are backoff delays. A child that ends
    before it was ever marked `proven` is not restarted, because its settings are at fault.
    """

    def __init__(self, command: Command) -> None:
        self.command = command
        self.proven = False
        self._process: asyncio.subprocess.Process | None = None
        self._stopping = False

    @property
    def pid(self) -> int | None:
        """Of the running process; None between two."""
        return self._process.pid if self._process is not None else None

    async def keep(self) -> None:
        """Run until `stop`. Raises ChildFailedError. Cancelling kills the process."""
        name = self.command.name
        restarts: deque[float] = deque(maxlen=len(_BACKOFF_S))
        try:
            while True:
                status = await self._run_once()
                if self._stopping:
                    return
                recent = sum(moment > time.monotonic() - _WINDOW_S for moment in restarts)
                if not self.proven or recent == len(_BACKOFF_S):
                    raise ChildFailedError(f"{name} ended: {status}\n{tail(self.command.log_path)}")
                logger.warning("%s ended (%s); starting it again", name, status)
                restarts.append(time.monotonic())
                await asyncio.sleep(_BACKOFF_S[recent])
        finally:
            self.kill()
            if self._process is not None:
                await self._process.wait()

    async def stop(self, grace_s: float) -> None:
        """SIGTERM, and SIGKILL when the process is still there after `grace_s` seconds."""
        self._stopping = True
        process = self._process
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        try:
            await asyncio.wait_for(process.wait(), grace_s)
        except TimeoutError:
            logger.warning("%s is not done after %g s: killed", self.command.name, grace_s)
            self.kill()
            await process.wait()

    def kill(self) -> None:
        """SIGKILL, now, for good."""
        self._stopping = True
        if self._process is not None and self._process.returncode is None:
            self._process.kill()

    async def _run_once(self) -> str:
        with self.command.log_path.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *self.command.argv,
                env=self.command.environ,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C reaches the launcher alone, which drains
                preexec_fn=die_with_parent,
            )
        if self._stopping:  # stopped while it was being spawned
            self._process.kill()
        return _describe(await self._process.wait())


def tail(path: Path) -> str:
    """The end of a log, indented, and where the rest is."""
    lines = path.read_text(errors="replace").splitlines()[-_TAIL_LINES:]
    return "\n".join([*(f"  {line}" for line in lines), f"Full log: {path}"])


def _describe(code: int) -> str:
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
