"""Standard output that may go away: a full disk or a closed terminal must not end a server."""

from __future__ import annotations

import contextlib
import io
import os
from typing import TextIO


def unbreakable(stream: TextIO | None) -> io.TextIOWrapper:
    """Writes to where `stream` does, at once, what can be written there; the rest is lost."""
    try:
        fd = stream.fileno() if stream is not None else None
    except (OSError, ValueError):
        fd = None
    return io.TextIOWrapper(_Lossy(fd), encoding="utf-8", errors="replace", write_through=True)


class _Lossy(io.BufferedIOBase):
    def __init__(self, fd: int | None) -> None:
        self._fd = fd

    @property
    def name(self) -> int | None:
        """As files without a path have it."""
        return self._fd

    def isatty(self) -> bool:
        return self._fd is not None and os.isatty(self._fd)

    def writable(self) -> bool:
        return True

    def write(self, data: bytes | bytearray | memoryview) -> int:  # type: ignore[override]
        rest = memoryview(data)
        with contextlib.suppress(OSError):
            while rest and self._fd is not None:
                rest = rest[os.write(self._fd, rest) :]
        return len(data)
