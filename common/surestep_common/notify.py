"""Signs of life between a process and the one that started it, by the protocol of sd_notify(3).

The starter puts the address of a datagram socket into NOTIFY_SOCKET; the process sends READY=1 once
and WATCHDOG=1 again and again. systemd does so for services of Type=notify.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from typing import NoReturn

from . import config
from .process import CREDENTIALS

READY, ALIVE, STOPPING = "READY=1", "WATCHDOG=1", "STOPPING=1"
_BEAT_S = 0.5
_MAX_BYTES = 4096
_MAX_READS = 100  # at a look


class Notifier:
    """The end of the process that is watched; does nothing where no signs of life are wanted."""

    def __init__(self) -> None:
        address = config.notify_address()
        abstract = address is not None and address.startswith("@")
        self._address = f"\0{address[1:]}" if abstract and address else address

    def tell(self, state: str) -> None:
        """Send a state; a reader that is late misses it."""
        if self._address is None:
            return
        with contextlib.suppress(OSError), _datagrams() as sender:
            sender.sendto(state.encode(), self._address)

    async def beat(self) -> NoReturn:
        """Say twice a second that this event loop runs, until cancelled."""
        while True:
            self.tell(ALIVE)
            await asyncio.sleep(_BEAT_S)


class Listener:
    """The end of the process that watches."""

    def __init__(self) -> None:
        self._socket = _datagrams()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self._socket.bind("")  # the kernel picks a name that is no file
        name: bytes = self._socket.getsockname()
        self.address = f"@{name[1:].decode()}"  # for NOTIFY_SOCKET

    def heard(self) -> bool:
        """Return whether anything came of this user since the last call; others may send too."""
        came = False
        with contextlib.suppress(BlockingIOError):
            for _ in range(_MAX_READS):  # a sender of more than that keeps no process busy
                came = self._sender() == os.getuid() or came
        return came

    def _sender(self) -> int:
        """Take the next datagram, and return the user who sent it, as the kernel says."""
        _, about, _, _ = self._socket.recvmsg(_MAX_BYTES, socket.CMSG_SPACE(CREDENTIALS.size))
        (_, _, credentials), *_ = about
        _, user, _ = CREDENTIALS.unpack(credentials)
        return int(user)

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()


def _datagrams() -> socket.socket:
    return socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
