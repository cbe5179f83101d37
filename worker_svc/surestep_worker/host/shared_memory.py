"""Memory without a file name that processes hand to each other (Linux memfd)."""

from __future__ import annotations

import fcntl
import os

_SEALS = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def create(name: str, size: int = 0) -> int:
    """A descriptor of `size` zero bytes; pages take memory once they are written. `name` shows up
    in /proc and means nothing."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size)
    return fd


def seal(fd: int) -> None:
    """From here on nobody can change it. Raises OSError while a writable mapping exists."""
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)


def is_sealed(fd: int) -> bool:
    """Whether its content is final."""
    return bool(fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_WRITE)
