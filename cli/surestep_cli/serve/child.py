"""Service process of the launcher."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from io import FileIO
from pathlib import Path

from surestep_common import log
from surestep_common.config import PARENT_PID
from surestep_common.process import STACK_DUMP_SIGNAL

logger = logging.getLogger(__name__)

_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 5.0
_GOOD_SERVICE_S = 30.0  # after which an end is the first one again
_QUIET_S = 60.0  # between two lines about a service that keeps ending
_STACK_DUMP_S = 0.5  # for a process to write its stacks, if it still can
_TAIL_LINES = 15
_TAIL_BYTES = 64 << 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """Command that starts a service. Its output is appended to `log_path`."""

    name: str
    argv: tuple[str, ...]
    environ: Mapping[str, str]
    log_path: Path


class ChildFailedError(Exception):
    """A service ended and a restart would not help; the message shows the end of its log."""


class BackOff:
    """Pauses between restarts: increasing, and short again after a long run."""

    def __init__(self) -> None:
        self._pause_s = 0.0

    def pause_s(self, lived_s: float) -> float:
        """Return the pause after a process that ran for `lived_s` seconds."""
        longer = max(2 * self._pause_s, _SHORTEST_PAUSE_S)
        again = lived_s < _GOOD_SERVICE_S
        self._pause_s = min(longer, _LONGEST_PAUSE_S) if again else _SHORTEST_PAUSE_S
        return self._pause_s

    @property
    def longest(self) -> bool:
        """Return whether pauses have reached their maximum."""
        return self._pause_s >= _LONGEST_PAUSE_S


class Child:
    """Runs a command and restarts it when it ends by itself. The command must call `die_with`.

    A child that ends before it was ever marked `proven` is not restarted, because its settings are
    at fault. One that has worked is always restarted.
    """

    def __init__(self, command: Command) -> None:
        self.command = command
        self.proven = False
        self._process: asyncio.subprocess.Process | None = None
        self._stopping = asyncio.Event()
        self._silent_until = 0.0  # about restarts
        self._has_log = True  # as far as known
        self._log_begin = 0  # of what the newest process writes

    @property
    def pid(self) -> int | None:
        """Process id of the running process; None between two."""
        process = self._process
        return process.pid if process is not None and process.returncode is None else None

    @property
    def stopping(self) -> bool:
        """Return whether the process is to end and not be restarted."""
        return self._stopping.is_set()

    async def keep(self) -> None:
        """Run until `stop`. Raise ChildFailedError. Cancelling kills the process."""
        back_off = BackOff()
        try:
            while True:
                began = time.monotonic()
                status = await self._run_once()
                if self._stopping.is_set():
                    return
                if not self.proven:
                    raise ChildFailedError(f"{self.command.name} ended: {status}\n{self.tail()}")
                pause_s = back_off.pause_s(time.monotonic() - began)
                self._tell(status, pause_s, often=back_off.longest)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._stopping.wait(), pause_s)
                if self._stopping.is_set():
                    return
        finally:
            self.kill()
            if self._process is not None:
                await self._process.wait()

    def tail(self) -> str:
        """Return the end of the newest process's output, indented, and the path of all of it."""
        lines = _lines(self.command.log_path, self._log_begin)[-_TAIL_LINES:]
        return "\n".join([*(f"  {line}" for line in lines), f"Full log: {self.command.log_path}"])

    async def stop(self, grace_s: float) -> None:
        """Send SIGTERM, and SIGKILL when the process is still there after `grace_s` seconds."""
        self._stopping.set()
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
        """Send SIGKILL to the process and all its descendants, and do not restart."""
        self._stopping.set()
        self._signal_all(signal.SIGKILL)

    def resume(self) -> None:
        """Send SIGCONT to the process and all its descendants."""
        self._signal_all(signal.SIGCONT)

    async def end(self) -> None:
        """Have the process and all its descendants dump their stacks, then kill them."""
        self._signal_all(STACK_DUMP_SIGNAL)
        await asyncio.sleep(_STACK_DUMP_S)
        self._signal_all(signal.SIGKILL)

    def _signal_all(self, number: int) -> None:
        if self.pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, number)  # it has a session of its own

    async def _run_once(self) -> str:
        """Run the process once and return how it ended."""
        try:
            await self._start()
        except (OSError, RuntimeError) as error:  # no memory, files, processes or threads left
            return f"cannot be started: {error}"
        assert self._process is not None
        if self._stopping.is_set():  # stopped while it was being spawned
            self._process.kill()
        return _describe(await self._process.wait())

    async def _start(self) -> None:
        with contextlib.ExitStack() as stack:
            file = self._open_log()
            output = stack.enter_context(file) if file is not None else _stderr()
            self._process = await asyncio.create_subprocess_exec(
                *self.command.argv,
                env={**self.command.environ, PARENT_PID: str(os.getpid())},
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,  # Ctrl-C reaches the launcher alone, which drains
            )

    def _open_log(self) -> FileIO | None:
        """Open the log for appending; log an error and return None where that fails."""
        try:
            file = _begin_log(self.command)
        except OSError as error:
            if self._has_log:
                logger.warning("the output of %s goes to stderr: %s", self.command.name, error)
            self._has_log = False
            return None
        self._has_log, self._log_begin = True, file.tell()
        return file

    def _tell(self, status: str, pause_s: float, *, often: bool) -> None:
        now = time.monotonic()
        if often and now < self._silent_until:
            return
        self._silent_until = now + _QUIET_S
        lines = _lines(self.command.log_path, self._log_begin)
        logger.warning(
            "%s ended (%s); starting it again in %.1f s%s%s",
            self.command.name,
            status,
            pause_s,
            f", and so on until it stays (logged once in {_QUIET_S:.0f} s)" if often else "",
            f"; its last words: {lines[-1].strip()}" if lines else "",
        )


def _begin_log(command: Command) -> FileIO:
    """Open the log, recreating a removed one, and write a first line to test it."""
    with contextlib.ExitStack() as stack:
        file = stack.enter_context(log.open_file(command.log_path))
        file.write(f"{datetime.now(UTC):%FT%TZ} {command.name} starts\n".encode())
        stack.pop_all()
    return file


def _stderr() -> int:
    """Return our standard error, if we have one."""
    try:
        descriptor = sys.stderr.fileno()
        os.fstat(descriptor)
    except (AttributeError, OSError, ValueError):
        return asyncio.subprocess.DEVNULL
    return descriptor


def _lines(path: Path, begin: int) -> list[str]:
    """Return the non-empty lines of a log from byte `begin` on, at most its end."""
    try:
        with path.open("rb") as file:
            file.seek(max(path.stat().st_size - _TAIL_BYTES, begin))
            text = file.read().decode(errors="replace")
    except OSError:
        return []
    return [line for line in text.splitlines() if line.strip()]


def _describe(code: int) -> str:
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
