"""Anonymous shared memory that processes pass to each other (Linux memfd)."""

from __future__ import annotations

import fcntl
import os

_SEALS = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def create(name: str, size: int = 0) -> int:
    """Return a descriptor of `size` zero bytes, whose pages take memory once written. `name` only
    appears in /proc."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size)
    return fd


def seal(fd: int) -> None:
    """Make the content immutable. Raises OSError while a writable mapping exists."""
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)


def is_sealed(fd: int) -> bool:
    """Return whether the content is immutable."""
    return bool(fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_WRITE)
