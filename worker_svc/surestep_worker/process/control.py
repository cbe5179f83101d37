"""Messages between a supervisor and its rank process, over the socket that is the rank's stdin.

The rank reports that it has imported everything, that it is ready or why it cannot start, and that
it received a termination signal; the supervisor has a standby copied, and activates one as the
rank. A message is one packet of JSON; file descriptors travel beside it. End of stream means that
the other process is gone.
"""

from __future__ import annotations

import base64
import binascii
import json
import os
import socket
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

from surestep_common.errors import InvalidRequest, Unavailable

from surestep_worker.checkpoint.held_weights import Source, WeightFds

MAX_BYTES = 64 << 10
STDIN = 0
_MAX_REASON = 2000  # characters
_MAX_FDS = 6


class MessageKind(StrEnum):
    """The kind of a message."""

    STANDBY = "standby"  # everything is imported
    COPY = "copy"  # leave a copy of yourself; with the descriptor of its own socket
    ACTIVATE = "activate"  # become the rank; with the descriptors of heartbeat and weights
    READY = "ready"  # the service answers
    FAILED = "failed"  # it could not start, and exits
    TERMINATING = "terminating"  # it received SIGTERM or SIGINT


class Failure(StrEnum):
    """Kind of a start's failure: another attempt may succeed, or not."""

    TRANSIENT = "transient"  # another attempt may succeed
    PERMANENT = "permanent"  # it will not, unless something is changed
    WEIGHTS = "weights"  # it may, if the weights are loaded again


class Message(NamedTuple):
    """A control message. The supervisor passes a rank's profile result on without reading it."""

    kind: MessageKind
    profile_result: bytes = b""
    fds: tuple[int, ...] = ()
    checkpoint: str = ""  # READY: fingerprint of the weights
    failure: Failure = Failure.TRANSIENT  # FAILED
    reason: str = ""  # FAILED: one line for operators
    pid: int = 0  # STANDBY: of the process that says so
    source: Source = Source(None)  # ACTIVATE, READY: where the weights are from


class Activation(NamedTuple):
    """Message by which a standby becomes the rank."""

    heartbeat_fd: int
    weights: WeightFds
    profile_result: bytes
    source: Source


def inherited() -> socket.socket:
    """Return the rank's end. Raises InvalidRequest in a process not started by a supervisor."""
    try:
        return socket.socket(fileno=os.dup(STDIN))
    except OSError as error:
        raise InvalidRequest("a rank is started by its supervisor: surestep_worker") from error


def send(end: socket.socket, message: Message) -> None:
    """Send a message. Raises OSError if the other process is gone."""
    socket.send_fds(end, [encode(message)], message.fds)


def receive(end: socket.socket) -> Message | None:
    """Return the next message, None at end of stream. Raises InvalidRequest for anything else."""
    try:
        data, fds, flags, _ = socket.recv_fds(end, MAX_BYTES, _MAX_FDS)
    except ConnectionResetError:  # the other process ended with messages that it had not read
        return None
    for fd in fds:
        os.set_inheritable(fd, False)
    if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
        raise InvalidRequest("a control message is too long")
    return decode(data, tuple(fds)) if data else None


def is_closed(end: socket.socket) -> bool:
    """Return whether the other process is gone."""
    try:
        return not end.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except ConnectionResetError:
        return True


def next_order(end: socket.socket) -> Activation | socket.socket:
    """Wait, without a limit, for a standby's next order: to become the rank, or to leave a copy of
    itself, whose socket is returned. Raises Unavailable if the supervisor is gone.
    """
    message = receive(end)
    if message is None:
        raise Unavailable("the supervisor is gone")
    if message.kind is MessageKind.COPY and len(message.fds) == 1:
        return socket.socket(fileno=message.fds[0])
    if message.kind is not MessageKind.ACTIVATE or len(message.fds) != _MAX_FDS:
        raise InvalidRequest(f"a standby received an unexpected message: {message.kind}")
    heartbeat_fd, *weights = message.fds
    return Activation(heartbeat_fd, WeightFds(*weights), message.profile_result, message.source)


def encode(message: Message) -> bytes:
    """Encode a message as one packet, without its descriptors."""
    data = message._asdict()
    del data["fds"]
    data["profile_result"] = base64.b64encode(message.profile_result).decode()
    data["reason"] = " ".join(message.reason.split())[:_MAX_REASON]
    folder, *versions = message.source
    data["source"] = [None if folder is None else str(folder), *versions]
    packet = json.dumps(data).encode()
    assert len(packet) <= MAX_BYTES
    return packet


def _source(folder: str | None, version: str, folder_version: str) -> Source:
    return Source(None if folder is None else Path(folder), version, folder_version)


def decode(packet: bytes, fds: tuple[int, ...] = ()) -> Message:
    """Decode a packet. Raises InvalidRequest for anything that `encode` did not produce."""
    try:
        data = json.loads(packet)
        return Message(
            MessageKind(data["kind"]),
            base64.b64decode(data["profile_result"], validate=True),
            fds,
            str(data["checkpoint"]),
            Failure(data["failure"]),
            str(data["reason"]),
            int(data["pid"]),
            _source(*data["source"]),
        )
    except (ValueError, KeyError, TypeError, RecursionError, binascii.Error) as error:
        raise InvalidRequest("not a control message") from error
