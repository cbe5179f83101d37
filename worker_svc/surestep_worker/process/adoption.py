"""Adoption: a rank outlives its supervisor, and the next supervisor takes it over as it is.

Only where a launcher starts supervisors again and the services talk over sockets in a folder of
their own: a rank listens there, beside its Worker service. The next supervisor is told what the
last one held: heartbeat, weights and measurements. A rank that is not adopted ends after a while.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
from typing import NamedTuple

from surestep_common import addresses
from surestep_common.config import parent_pid
from surestep_common.errors import InvalidRequest
from surestep_common.process import CREDENTIALS, DEAD, ENDING, outlive_parent, state_of
from surestep_proto import supervisor_pb2 as pb

from surestep_worker.checkpoint.held_weights import WeightFds
from surestep_worker.host import activity

from . import control
from .control import Message, MessageKind

_SUFFIX = ".c"  # behind the path of the Worker service's socket
_ORPHAN_S = 10  # without a supervisor, after which the kernel ends a rank
_INTRODUCTION_S = 1.0  # for a rank to say who it is: half a second passes if its event loop is busy
_OBSERVED_S = 0.2  # of a rank that has not


class Orphan:
    """The rank's side, from when it is ready."""

    def __init__(self, path: str, introduction: Message) -> None:
        """Listen at `path`, and stay when the parent ends. Raises OSError."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(path)
        self._listener.listen(1)
        self._listener.setblocking(False)
        self._introduction = introduction
        self._launcher = parent_pid()
        outlive_parent()

    async def adopted(self) -> socket.socket | None:
        """Wait for the next supervisor and return the socket to it; None if there will be none."""
        if self._launcher is None or state_of(self._launcher) in (DEAD, ENDING):
            return None
        signal.setitimer(signal.ITIMER_REAL, _ORPHAN_S)  # ends a process that hangs, too
        supervisor, _ = await asyncio.get_running_loop().sock_accept(self._listener)
        signal.setitimer(signal.ITIMER_REAL, 0)
        supervisor.setblocking(True)
        with contextlib.suppress(OSError):  # then it is gone as well
            control.send(supervisor, self._introduction)
        return supervisor


class Adopted(NamedTuple):
    """A living rank, as the next supervisor finds it."""

    pid: int
    control: socket.socket
    heartbeat_fd: int
    weights: WeightFds
    introduction: Message


def place(rank_address: str) -> str | None:
    """Return the path at which a rank can be adopted; None if it listens on a port, or no
    launcher would start its supervisor again.
    """
    path = addresses.socket_path(rank_address)
    return None if path is None or parent_pid() is None else path + _SUFFIX


async def adopt(path: str) -> Adopted | None:
    """Take over the rank that an earlier supervisor has left; None if there is none. It is ended
    if it does not say who it is, although it need not wait for a core or a disk.
    """
    end = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        end.settimeout(_INTRODUCTION_S)
        await asyncio.to_thread(end.connect, path)
    except OSError:
        end.close()
        return None
    told = end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
    pid, _, _ = CREDENTIALS.unpack(told)
    try:
        message = await _introduced(end, pid)
        if message is None or message.kind is not MessageKind.READY or not message.fds:
            raise InvalidRequest("a rank does not say who it is")
    except (OSError, InvalidRequest):
        end.close()
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        return None
    end.setblocking(False)
    heartbeat_fd, *weights = message.fds
    return Adopted(pid, end, heartbeat_fd, WeightFds(*weights), message)


async def _introduced(end: socket.socket, pid: int) -> Message | None:
    """Return what a rank says, which may have no turn for a while. Raise OSError if it hangs."""
    while True:
        try:
            return await asyncio.to_thread(control.receive, end)
        except TimeoutError:
            if await activity.observe(pid, _OBSERVED_S) != pb.WAITING:
                raise
