"""What a supervisor and its rank process tell each other, over the socket that is the rank's stdin.

The rank says when it has imported everything, when it is ready or why it cannot become so, and when
a signal makes it leave; the supervisor tells a standby to become the rank. A message is one packet
of JSON; descriptors travel beside it. The end of the stream means that the other process is gone.
"""

from __future__ import annotations

import base64
import binascii
import json
import os
import socket
from enum import StrEnum
from typing import NamedTuple

from surestep_common.errors import InvalidRequest, Unavailable

MAX_BYTES = 64 << 10
_MAX_REASON = 2000  # characters
_MAX_FDS = 2


class MessageKind(StrEnum):
    """What a message means."""

    STANDBY = "standby"  # everything is imported
    ACTIVATE = "activate"  # be the rank; with the descriptors of heartbeat and weights
    READY = "ready"  # the service answers
    FAILED = "failed"  # it cannot be the rank, and ends
    TERMINATING = "terminating"  # somebody has sent it SIGTERM or SIGINT


class Failure(StrEnum):
    """What there is to be hoped for after a rank has failed to start."""

    TRANSIENT = "transient"  # another attempt may succeed
    PERMANENT = "permanent"  # it will not, unless somebody changes something
    WEIGHTS = "weights"  # it will, with weights that are loaded afresh


class Message(NamedTuple):
    """The profile result is what a rank has measured: the supervisor hands it on unread."""

    kind: MessageKind
    profile_result: bytes = b""
    fds: tuple[int, ...] = ()
    checkpoint: str = ""  # READY: fingerprint of the weights
    failure: Failure = Failure.TRANSIENT  # FAILED
    reason: str = ""  # FAILED: one line for people


class Activation(NamedTuple):
    """What a standby needs to become the rank."""

    heartbeat_fd: int
    weights_fd: int
    profile_result: bytes


def pair() -> tuple[socket.socket, socket.socket]:
    """The two ends."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def inherited() -> socket.socket:
    """The rank's end. Raises InvalidRequest in a process that no supervisor has started."""
    try:
        return socket.socket(fileno=os.dup(0))
    except OSError as error:
        raise InvalidRequest("a rank is started by its supervisor: surestep_worker") from error


def send(end: socket.socket, message: Message) -> None:
    """Raises OSError when the other process is gone."""
    socket.send_fds(end, [encode(message)], message.fds)


def receive(end: socket.socket) -> Message | None:
    """The next message, None at the end of the stream. Raises InvalidRequest for anything else."""
    data, fds, flags, _ = socket.recv_fds(end, MAX_BYTES, _MAX_FDS)
    for fd in fds:
        os.set_inheritable(fd, False)
    if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
        raise InvalidRequest("a control message is too long")
    return decode(data, tuple(fds)) if data else None


def is_closed(end: socket.socket) -> bool:
    """Whether the other process is gone."""
    try:
        return not end.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False


def wait_for_activation(end: socket.socket) -> Activation:
    """Blocks for as long as it takes. Raises Unavailable when the supervisor is gone."""
    message = receive(end)
    if message is None:
        raise Unavailable("the supervisor is gone")
    if message.kind is not MessageKind.ACTIVATE or len(message.fds) != _MAX_FDS:
        raise InvalidRequest(f"a standby cannot be told {message.kind}")
    heartbeat_fd, weights_fd = message.fds
    return Activation(heartbeat_fd, weights_fd, message.profile_result)


def encode(message: Message) -> bytes:
    """One packet; descriptors are not part of it."""
    data = message._asdict()
    del data["fds"]
    data["profile_result"] = base64.b64encode(message.profile_result).decode()
    data["reason"] = " ".join(message.reason.split())[:_MAX_REASON]
    packet = json.dumps(data).encode()
    assert len(packet) <= MAX_BYTES
    return packet


def decode(packet: bytes, fds: tuple[int, ...] = ()) -> Message:
    """Raises InvalidRequest for anything that `encode` has not made."""
    try:
        data = json.loads(packet)
        return Message(
            MessageKind(data["kind"]),
            base64.b64decode(data["profile_result"], validate=True),
            fds,
            str(data["checkpoint"]),
            Failure(data["failure"]),
            str(data["reason"]),
        )
    except (ValueError, KeyError, TypeError, RecursionError, binascii.Error) as error:
        raise InvalidRequest("no control message") from error
