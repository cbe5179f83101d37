"""Rank processes under their supervisor: first a standby, then the rank; and how they ended."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import signal
import socket
import time
from collections import deque
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from surestep_common.config import (
    PARENT_PID,
    child_environ,
    parent_pid,
    without_cublas_workspace,
)
from surestep_common.errors import InvalidRequest
from surestep_common.process import (
    DEAD,
    ENDING,
    STACK_DUMP_SIGNAL,
    STOPPED,
    TRACED,
    state_of,
)
from surestep_proto import supervisor_pb2 as pb

from surestep_worker.checkpoint.held_weights import HeldWeights
from surestep_worker.config import WorkerSettings
from surestep_worker.host import shared_memory as memory
from surestep_worker.host.network import interface_towards
from surestep_worker.step.heartbeat import SIZE, Heartbeat, HeartbeatState

from . import control
from .adoption import Adopted
from .child import COPYABLE, SPARE, Child, Copy, Started, Stranger, control_sockets, start
from .control import Failure, Message, MessageKind

logger = logging.getLogger(__name__)

_STACK_DUMP_S = 0.5  # time limit of a rank for writing its stacks, after which it exits
_TERM_GRACE_S = 5.0
_KEPT = 20  # of the latest exits
_GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"


# Signals that a process raises itself, or the kernel because of its code.
_OWN_SIGNALS = frozenset(
    {
        signal.SIGSEGV,
        signal.SIGABRT,
        signal.SIGBUS,
        signal.SIGFPE,
        signal.SIGILL,
        signal.SIGTRAP,
        signal.SIGSYS,
    }
)


class ExitReason(NamedTuple):
    """Why a process ended."""

    cause: pb.ExitCause
    reason: str
    signal: int = 0  # that ended it, unless it was the supervisor's; 0 = none
    outside: bool = False  # not explained by anything it computed


class StartFailure(NamedTuple):
    """Why a rank did not become ready."""

    failure: Failure
    reason: str


class RankProcess:
    """A process started by `spawn`; it is ended by `end` or `terminate`, or ends by itself."""

    def __init__(self, started: Started) -> None:
        """Raises OSError, and ends the process, if there is no descriptor left for it."""
        try:
            self._process = Child(started.process)
        except OSError:
            started.control.close()
            raise
        self._control = started.control
        self._exit_reason: ExitReason | None = None
        self.imported = False  # reported by the process: what remains is quick
        self.start_failure: StartFailure | None = None  # reported by the process, which then exits
        self.terminating = False  # reported by the process: it received a signal
        self.recorded = asyncio.Event()  # its exit is in the ExitHistory
        self.heartbeat = Heartbeat.local()

    @classmethod
    def adopted(cls, found: Adopted, idle_s: float, load_s: float) -> RankProcess:
        """Take over a living rank. Raises OSError if it has just ended."""
        rank = cls(Started(Stranger(found.pid), found.control))
        rank.imported = True
        rank.heartbeat = Heartbeat.shared(found.heartbeat_fd, idle_s, load_s)
        os.close(found.heartbeat_fd)
        return rank

    @classmethod
    async def spawn(
        cls, command: Sequence[str], settings: WorkerSettings, *, spare: bool = False
    ) -> RankProcess:
        """Start a standby; its settings are passed in the environment. A `spare` one leaves the
        cores to the rank that there is."""
        launcher = {PARENT_PID: str(parent)} if (parent := parent_pid()) is not None else {}
        environ = child_environ(settings.environ() | launcher | COPYABLE)
        if settings.tensor_parallel_size > 1 and _GLOO_INTERFACE not in environ:
            interface = await asyncio.to_thread(interface_towards, settings.tp_master)
            environ |= {_GLOO_INTERFACE: interface} if interface else {}
        if settings.device == "cuda" and settings.linear_backend == "auto":
            environ |= without_cublas_workspace()  # read when a process first uses cuBLAS
        return cls(start([*command, SPARE] if spare else command, environ))

    async def prepared(self) -> bool:
        """Wait until a standby has imported everything. Return False if it ends before."""
        if not self.imported:
            message = await self._message()
            self.imported = message is not None and message.kind is MessageKind.STANDBY
        return self.imported

    def order_copy(self) -> socket.socket:
        """Have this standby leave a copy of itself, another child of this process, which has to
        adopt orphans meanwhile. Return the socket to it. Raises OSError."""
        ours, theirs = control_sockets()
        with theirs:
            control.send(self._control, Message(MessageKind.COPY, fds=(theirs.fileno(),)))
        return ours

    @classmethod
    async def copied(cls, ours: socket.socket) -> RankProcess:
        """Wait for a copy that was ordered. Raises OSError if there will be none."""
        packet = await asyncio.get_running_loop().sock_recv(ours, control.MAX_BYTES)
        if not packet:
            raise OSError(errno.ECHILD, "it has left none")
        copy = cls(Started(Copy(control.decode(packet).pid), ours))
        copy.imported = True
        return copy

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Return whether the process has not been reaped yet."""
        return self._process.alive

    def activate(
        self, weights: HeldWeights, profile_result: bytes, idle_s: float, load_s: float
    ) -> None:
        """Activate the standby as the rank. If it dies of that, its exit shows it."""
        fd = memory.create("surestep-heartbeat", SIZE)
        self.heartbeat = Heartbeat.shared(fd, idle_s, load_s)
        self.heartbeat.expect(idle_s if self.imported else load_s)
        with contextlib.suppress(OSError):
            order = Message(MessageKind.ACTIVATE, profile_result, (fd, *weights.fds))
            control.send(self._control, order._replace(source=weights.source))
        os.close(fd)

    async def messages(self) -> AsyncIterator[Message]:
        """Yield the process's messages until it is gone or sends an invalid one."""
        while (message := await self._message()) is not None:
            yield message

    async def _message(self) -> Message | None:
        try:
            packet = await asyncio.get_running_loop().sock_recv(self._control, control.MAX_BYTES)
            return control.decode(packet) if packet else None
        except (OSError, InvalidRequest) as error:
            logger.warning("lost contact with pid %d: %s", self.pid, error)
            return None

    async def wait(self) -> ExitReason:
        """Wait for the exit; return its reason. The last messages may still be unread."""
        code = await self._process.wait()
        if self._exit_reason is not None:
            return self._exit_reason
        if code is None:
            return ExitReason(pb.UNSEEN, "ended, and an earlier supervisor had started it")
        if code < 0:
            name, outside = signal.Signals(-code).name, -code not in _OWN_SIGNALS
            return ExitReason(pb.KILLED, f"signal {name}", -code, outside)
        return ExitReason(pb.EXITED, f"exit code {code}", outside=self.terminating)

    def close(self) -> None:
        """Close the control socket."""
        self._control.close()

    async def end(self, cause: pb.ExitCause, reason: str, *, dump: bool = True) -> None:
        """Make the process `dump` its stacks, then kill it. The first reason given stays.

        A process that is dead already, even if this has not been noticed yet, has a reason of its
        own.
        """
        state = state_of(self.pid)
        if state not in (DEAD, ENDING):
            stopped = state in (STOPPED, TRACED)  # a stopped process handles no signal
            outside = stopped or self.terminating  # something else kept it from answering
            self._exit_reason = self._exit_reason or ExitReason(cause, reason, outside=outside)
            await self._kill(dump=dump and not stopped)
        await self._process.wait()

    async def _kill(self, *, dump: bool) -> None:
        if dump:
            self._process.send_signal(STACK_DUMP_SIGNAL)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._process.wait(), _STACK_DUMP_S)
        self._process.send_signal(signal.SIGKILL)

    async def terminate(self) -> None:
        """Send SIGTERM; kill the process if it takes more than a few seconds.

        If cancelled it is left to end by itself.
        """
        self._process.send_signal(signal.SIGTERM)
        try:
            await asyncio.wait_for(self._process.wait(), _TERM_GRACE_S)
        except TimeoutError:
            self._process.send_signal(signal.SIGKILL)
            await self.wait()
        finally:
            self.close()


@dataclass(slots=True)
class Exit:
    """The end of one rank process. Times are of CLOCK_MONOTONIC."""

    pid: int
    exit_reason: ExitReason
    last: HeartbeatState
    last_age_s: float
    at: float
    replaced_s: float = 0.0  # until the next rank was ready; 0 = not yet


class ExitHistory:
    """The latest exits of rank processes."""

    def __init__(self) -> None:
        self._exits: deque[Exit] = deque(maxlen=_KEPT)
        self.count = 0
        self.failures = 0  # consecutive ones before the rank was ready

    def record(
        self, pid: int, exit_reason: ExitReason, last: HeartbeatState, *, was_ready: bool
    ) -> None:
        """Record that a rank has just ended."""
        self.count += 1
        self.failures = 0 if was_ready else self.failures + 1
        self._exits.appendleft(Exit(pid, exit_reason, last, last.age_s(), time.monotonic()))

    def record_ready(self) -> float:
        """Record that a rank is ready; return the seconds since the previous one ended, or 0."""
        self.failures = 0
        now = time.monotonic()
        for exit_ in self._exits:
            exit_.replaced_s = exit_.replaced_s or now - exit_.at
        return self._exits[0].replaced_s if self._exits else 0.0

    @property
    def last(self) -> str:
        """The latest exit in one line; empty = none."""
        if not self._exits:
            return ""
        return f"pid {self._exits[0].pid}: {self._exits[0].exit_reason.reason}"

    def reports(self) -> Iterator[pb.RankExit]:
        """Yield the recorded exits, newest first."""
        now = time.monotonic()
        for exit_ in self._exits:
            yield pb.RankExit(
                pid=exit_.pid,
                cause=exit_.exit_reason.cause,
                reason=exit_.exit_reason.reason,
                last=heartbeat_proto(exit_.last, exit_.last_age_s),
                age_s=now - exit_.at,
                replaced_s=exit_.replaced_s,
                signal=exit_.exit_reason.signal,
                outside=exit_.exit_reason.outside,
            )


def heartbeat_proto(beat: HeartbeatState, age_s: float) -> pb.Heartbeat:
    return pb.Heartbeat(epoch=beat.epoch, step=beat.step, phase=beat.phase, age_s=age_s)
