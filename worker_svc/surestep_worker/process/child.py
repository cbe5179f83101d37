"""Start a rank process and notice its end.

It imports next to nothing, so that a supervisor can start its first rank before it imports what it
needs itself: both take a part of a second.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from surestep_common.process import die_with, python_module

START_RANK = "--start-rank"
COPYABLE = {"OPENBLAS_NUM_THREADS": "1"}  # environment: a fork would not have numpy's threads
_GPUS = "/dev/nvidia"
_LOOKS, _LOOK_S = 200, 0.001
SPARE = "--spare"  # of a standby that is started while there is a rank


class Started(NamedTuple):
    """A process, and our end of the control socket that is its stdin."""

    process: subprocess.Popen[bytes] | Stranger
    control: socket.socket


def rank_command() -> list[str]:
    """Return the command line of a standby."""
    return list(python_module("surestep_worker.process.rank"))


def start(command: Sequence[str], environ: Mapping[str, str] | None) -> Started:
    """Start a process, in this one's environment if none is given. Raises OSError."""
    ours, theirs = control_sockets()
    with theirs:
        try:
            process = subprocess.Popen(command, stdin=theirs.fileno(), env=environ)  # noqa: S603
        except BaseException:
            ours.close()
            raise
    return Started(process, ours)


def control_sockets() -> tuple[socket.socket, socket.socket]:
    """Return both ends of a control socket: ours, which does not block, and the rank's."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setblocking(False)
    return ours, theirs


def fork_beside(parent: int) -> bool:
    """Fork, and return whether this is the new process: another child of `parent`, which is this
    one's parent and adopts orphans meanwhile. Raises OSError, also for a process with threads or a
    GPU: a fork has none of them, and is of no use where something waits for them.
    """
    if not _has_no_threads():
        raise OSError(errno.EDEADLK, "it has threads")
    if any(path.startswith(_GPUS) for path in _open_files()):
        raise OSError(errno.EBUSY, "it has opened a GPU")
    between = os.fork()
    if between:
        _, status = os.waitpid(between, 0)
        if code := os.waitstatus_to_exitcode(status):
            raise OSError(code, os.strerror(code))
        return False
    between = os.getpid()
    try:
        new = os.fork() == 0
    except OSError as error:
        os._exit(error.errno or errno.EAGAIN)
    if not new:
        os._exit(0)
    while os.getppid() == between:
        time.sleep(_LOOK_S)
    die_with(parent)
    return True


def _has_no_threads() -> bool:
    """Wait a moment for those that have ended as far as Python knows."""
    for _ in range(_LOOKS):
        if len(os.listdir("/proc/self/task")) == 1:
            return True
        time.sleep(_LOOK_S)
    return False


def _open_files() -> Iterator[str]:
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the list itself is closed by now
            yield os.readlink(f"/proc/self/fd/{name}")


def start_early(arguments: list[str]) -> Started | None:
    """Start a standby with the environment of this process, if its first argument says so; that
    argument is removed.

    `surestep serve` says so for CPUs. What a rank for GPUs finds in its environment takes all
    settings to know.
    """
    if arguments[1:2] != [START_RANK]:
        return None
    del arguments[1]
    try:
        return start(rank_command(), None)
    except OSError:
        return None  # the supervisor tries again, and tells


def is_spare(arguments: list[str]) -> bool:
    """Return whether these arguments are of a spare standby; the one that says so is removed."""
    if SPARE not in arguments:
        return False
    arguments.remove(SPARE)
    return True


class Stranger:
    """Process that another process has started, with the interface of `Popen`."""

    returncode: int | None = None  # is known to the parent alone

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def wait(self) -> None:
        """Return: nothing is left of it when its end is noticed."""

    def kill(self) -> None:
        """Kill it."""
        os.kill(self.pid, signal.SIGKILL)


class Copy(Stranger):
    """A child that this process has adopted; `Popen` is for those that it has started."""

    def wait(self) -> None:
        """Reap it, when it has ended."""
        _, status = os.waitpid(self.pid, 0)
        self.returncode = os.waitstatus_to_exitcode(status)


class Child:
    """A started process in an event loop, which waits for its end."""

    def __init__(self, process: subprocess.Popen[bytes] | Stranger) -> None:
        """Raises OSError, and ends the process, if there is no descriptor left for it."""
        self._process = process
        self._exited = asyncio.Event()
        try:
            self._fd = os.pidfd_open(process.pid)
        except OSError:
            process.kill()
            process.wait()
            raise
        asyncio.get_running_loop().add_reader(self._fd, self._reap)

    def _reap(self) -> None:
        self._process.wait()  # it has ended
        asyncio.get_running_loop().remove_reader(self._fd)
        os.close(self._fd)
        self._exited.set()

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Return whether the process has not been reaped yet."""
        return not self._exited.is_set()

    async def wait(self) -> int | None:
        """Wait for its end. Return its exit status, negative: the signal that ended it; None of a
        stranger."""
        await self._exited.wait()
        return self._process.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal, unless it has been reaped."""
        if self.alive:
            os.kill(self.pid, number)
