"""One rank process in the care of its supervisor: a standby at first, then the rank."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
from collections.abc import AsyncIterator, Sequence
from typing import NamedTuple

from surestep_common.config import child_environ, without_cublas_workspace
from surestep_common.errors import InvalidRequest
from surestep_common.process import DEAD, ENDING, STACK_DUMP_SIGNAL, STOPPED, TRACED, state_of
from surestep_proto import supervisor_pb2 as pb

from surestep_worker.config import WorkerSettings
from surestep_worker.host import shared_memory as memory
from surestep_worker.host.heartbeat import SIZE, Heartbeat

from . import control
from .control import Failure, Message, MessageKind

logger = logging.getLogger(__name__)

_STACK_DUMP_S = 0.5  # most that a rank gets to write its stacks, behind which it ends
_TERM_GRACE_S = 5.0


# What a process does to itself, or its code makes the kernel do to it.
_OWN_SIGNALS = frozenset(
    {
        *(signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL),
        *(signal.SIGTRAP, signal.SIGSYS),
    }
)


class ExitReason(NamedTuple):
    """Why a process ended."""

    cause: pb.ExitCause
    reason: str
    signal: int = 0  # that came from elsewhere; 0 = none
    outside: bool = False  # nothing that it computed explains it


class StartFailure(NamedTuple):
    """Why a rank did not become ready."""

    failure: Failure
    reason: str


class RankProcess:
    """Made by `spawn`; ended by `end` or `terminate`, or by itself."""

    def __init__(self, process: asyncio.subprocess.Process, end: socket.socket) -> None:
        self._process = process
        self._control = end
        self._exit_reason: ExitReason | None = None
        self.imported = False  # it has said so: what remains is quick
        self.start_failure: StartFailure | None = None  # it has said so, and ends
        self.terminating = False  # it has said so: somebody's signal made it
        self.recorded = asyncio.Event()  # its end is in the supervisor's books
        self.heartbeat = Heartbeat.local()

    @classmethod
    async def spawn(cls, command: Sequence[str], settings: WorkerSettings) -> RankProcess:
        """Start a standby; its settings travel in the environment."""
        environ = child_environ(settings.environ())
        if settings.device == "cuda" and settings.linear_backend == "auto":
            environ |= without_cublas_workspace()  # read when a process first uses cuBLAS
        with contextlib.ExitStack() as stack:
            ours, theirs = map(stack.enter_context, control.pair())
            process = await asyncio.create_subprocess_exec(
                *command, stdin=theirs.fileno(), env=environ
            )
            theirs.close()
            stack.pop_all()
        ours.setblocking(False)
        return cls(process, ours)

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether its end has not been seen."""
        return self._process.returncode is None

    def activate(
        self, weights_fd: int, profile_result: bytes, idle_s: float, load_s: float
    ) -> None:
        """Tell the standby to become the rank. One that dies of it is noticed by its exit."""
        fd = memory.create("surestep-heartbeat", SIZE)
        self.heartbeat = Heartbeat.shared(fd, idle_s, load_s)
        self.heartbeat.expect(idle_s if self.imported else load_s)
        with contextlib.suppress(OSError):
            control.send(
                self._control, Message(MessageKind.ACTIVATE, profile_result, (fd, weights_fd))
            )
        os.close(fd)

    async def messages(self) -> AsyncIterator[Message]:
        """What it says, until it is gone or talks nonsense."""
        loop = asyncio.get_running_loop()
        try:
            while packet := await loop.sock_recv(self._control, control.MAX_BYTES):
                yield control.decode(packet)
        except (OSError, InvalidRequest) as error:
            logger.warning("nothing more is heard from pid %d: %s", self.pid, error)

    async def wait(self) -> ExitReason:
        """Its end, and why. What it said last may not have been read yet."""
        code = await self._process.wait()
        if self._exit_reason is not None:
            return self._exit_reason
        if code < 0:
            name, outside = signal.Signals(-code).name, -code not in _OWN_SIGNALS
            return ExitReason(pb.KILLED, f"signal {name}", -code, outside)
        return ExitReason(pb.EXITED, f"exit code {code}", outside=self.terminating)

    def close(self) -> None:
        """Nobody listens any more."""
        self._control.close()

    async def end(self, cause: pb.ExitCause, reason: str) -> None:
        """Have it dump its stacks, then kill it. The first reason that is given stays.

        One that is dead already, which nobody may have noticed yet, has a reason of its own.
        """
        state = state_of(self.pid)
        if state not in (DEAD, ENDING):
            stopped = state in (STOPPED, TRACED)  # such a process handles no signal
            outside = stopped or self.terminating  # something else kept it from answering
            self._exit_reason = self._exit_reason or ExitReason(cause, reason, outside=outside)
            await self._kill(dump=not stopped)
        await self._process.wait()

    async def _kill(self, *, dump: bool) -> None:
        with contextlib.suppress(ProcessLookupError):
            if dump:
                self._process.send_signal(STACK_DUMP_SIGNAL)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._process.wait(), _STACK_DUMP_S)
            self._process.kill()

    async def terminate(self) -> None:
        """Let it finish what it can in a few seconds."""
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()
        try:
            await asyncio.wait_for(self._process.wait(), _TERM_GRACE_S)
        except TimeoutError:
            self._process.kill()
        await self.wait()
        self.close()
