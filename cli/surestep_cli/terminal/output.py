"""Output: standard output that may be a pipe or closed, and files that are written at the end."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from rich.console import Console
from surestep_common.errors import Unavailable

_LONGEST_LINE = 10_000  # characters


def writable(path: Path, endings: Sequence[str]) -> Path:
    """Return the path if a file can be written there; checked before the work, not after it.

    Raise ValueError.
    """
    if path.suffix.lower() not in endings:
        raise ValueError(f"the name must end in {' or '.join(endings)}")
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ValueError("no file that can be written")
    return path


def write_file(path: Path, text: str) -> None:
    """Write a file. Raise Unavailable."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise Unavailable(f"cannot write {path}: {error.strerror}") from error


def report_console(*, soft_wrap: bool = False) -> Console:
    """Return a console on standard output that cuts no line of a pipe or a file; with `soft_wrap`
    it breaks none in a terminal either."""
    out = Console(highlight=False, soft_wrap=soft_wrap)
    if not out.is_terminal:
        out.width = _LONGEST_LINE
    return out


def unbreakable(stream: TextIO | None) -> io.TextIOWrapper:
    """Return a stream that writes to `stream` at once and drops what cannot be written.

    A full disk or a closed terminal must not end a server.
    """
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
        """Return a name as files without a path have it."""
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
