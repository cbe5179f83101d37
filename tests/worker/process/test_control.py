"""What supervisor and rank tell each other, over a real socket."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from surestep_common.errors import InvalidRequest, Unavailable
from surestep_worker.checkpoint.held_weights import Source
from surestep_worker.host import shared_memory as memory
from surestep_worker.process import control
from surestep_worker.process.control import Message, MessageKind


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        yield ours, theirs


@given(st.sampled_from(MessageKind), st.binary(max_size=40_000))
def test_messages_arrive_as_they_were_sent(kind: MessageKind, profile_result: bytes) -> None:
    message = Message(kind, profile_result)
    assert control.decode(control.encode(message)) == message


@given(st.binary() | st.text().map(str.encode))
def test_nothing_else_is_a_message(packet: bytes) -> None:
    with pytest.raises(InvalidRequest):
        control.decode(packet)


@given(
    st.recursive(
        st.none() | st.integers() | st.text(),
        lambda x: st.dictionaries(st.sampled_from(["kind", "profile_result"]), x),
    )
)
def test_no_other_json_is_a_message(data: object) -> None:
    with pytest.raises(InvalidRequest):
        control.decode(json.dumps(data).encode())


def test_descriptors_travel_with_an_activation(ends: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = ends
    fds = tuple(memory.create(f"{size}", size) for size in range(5, 11))
    source = Source(Path("/models/tiny"), "v2", "v1")
    order = Message(MessageKind.ACTIVATE, b"profile_result", fds, source=source)
    control.send(ours, order)
    activation = control.next_order(theirs)
    assert isinstance(activation, control.Activation)
    received = activation.heartbeat_fd, *activation.weights
    assert (activation.profile_result, activation.source) == (b"profile_result", source)
    assert [os.fstat(fd).st_size for fd in received] == [*range(5, 11)]
    assert not any(os.get_inheritable(fd) for fd in received)
    for fd in (*fds, *received):
        os.close(fd)


@pytest.mark.parametrize("unread", [0, 1])
@pytest.mark.parametrize("asked", [True, False])
def test_a_supervisor_that_is_gone(
    ends: tuple[socket.socket, socket.socket], unread: int, asked: bool
) -> None:
    """It may have been killed before it had read what a standby sent: the connection is reset."""
    ours, theirs = ends
    for _ in range(unread):
        control.send(theirs, Message(MessageKind.STANDBY))
    assert not control.is_closed(theirs)
    ours.close()
    assert not asked or control.is_closed(theirs)
    with pytest.raises(Unavailable, match="supervisor is gone"):
        control.next_order(theirs)


def test_a_message_that_is_too_long(ends: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = ends
    ours.send(b"x" * (control.MAX_BYTES + 1))
    with pytest.raises(InvalidRequest, match="too long"):
        control.receive(theirs)
