"""Logging, configured once per process: service and rank on every line, JSON on request.

Messages may hold the text of clients, so no character of one begins a line or steers a terminal.
"""

from __future__ import annotations

import json
import logging
import os
import re
import sys
import time
from contextvars import ContextVar
from datetime import UTC, datetime
from io import FileIO
from pathlib import Path

# Control characters, line and paragraph separators, marks that reorder text, and surrogates.
_CONTROL = re.compile(
    r"[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)
FOLDER_MODE = 0o700
_INDENT = "    "  # of what is no line of its own

request_id: ContextVar[str | None] = ContextVar("request_id", default=None)


def configure(
    service: str, *, rank: int | None = None, level: str = "INFO", as_json: bool = False
) -> None:
    """Send all logging of this process to stderr. `rank` is the tensor-parallel rank, if any."""
    name = service if rank is None else f"{service}.{rank}"
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JsonFormatter(name) if as_json else _LineFormatter(name))
    logging.basicConfig(level=level, handlers=[handler], force=True)
    logging.captureWarnings(True)
    for noisy in ("asyncio", "httpx", "httpx2", "httpcore", "httpcore2", "urllib3", "filelock"):
        logging.getLogger(noisy).setLevel(logging.WARNING)


def make_folder(path: Path) -> None:
    """Make a folder of logs, and those missing above it, for this user alone, if it is missing."""
    if not path.parent.is_dir():
        make_folder(path.parent)
    path.mkdir(FOLDER_MODE, exist_ok=True)


def open_file(path: Path) -> FileIO:
    """Open a log to append to it. A missing file or folder is made for this user alone."""
    make_folder(path.parent)
    return open(path, "ab", buffering=0, opener=_private)  # the opener sets the mode


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, mode=0o600)


class Sparingly:
    """Warns about what may happen any number of times: at most one line in so many seconds."""

    def __init__(self, logger: logging.Logger, interval_s: float = 10.0) -> None:
        self._logger = logger
        self._interval_s = interval_s
        self._next = 0.0  # when there may be a line again
        self._left_out = 0

    def warning(self, message: str, *args: object) -> None:
        """Log the line, or count it as left out."""
        now = time.monotonic()
        if now < self._next:
            self._left_out += 1
            return
        self._next = now + self._interval_s
        more = f" ({self._left_out} more since the last such line)" if self._left_out else ""
        self._left_out = 0
        self._logger.warning("%s%s", message % args, more)


def escaped(text: str) -> str:
    """Return `text` with Python's escape in place of every control character."""
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


class _LineFormatter(logging.Formatter):
    """`2026-01-31T12:00:00.123Z INFO gateway surestep_gateway.app [request-id] message`.

    Lines of a traceback follow it, indented.
    """

    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        request = request_id.get()
        tag = f"[{request}] " if request is not None else ""
        head = f"{_timestamp(record)} {record.levelname} {self._service} {record.name}"
        below = [self.formatException(record.exc_info)] if record.exc_info else []
        if record.stack_info:
            below.append(record.stack_info)
        lines = [_INDENT + escaped(line) for text in below for line in text.split("\n")]
        return "\n".join([escaped(f"{head} {tag}{record.getMessage()}"), *lines])


class _JsonFormatter(logging.Formatter):
    """Formatter to an object per line; keys that do not apply are left out."""

    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        fields = {
            "time": _timestamp(record),
            "level": record.levelname,
            "service": self._service,
            "logger": record.name,
            "request_id": request_id.get(),
            "message": record.getMessage(),
            "exception": self.formatException(record.exc_info) if record.exc_info else None,
        }
        told = json.dumps({key: value for key, value in fields.items() if value is not None})
        return told.replace("\x7f", "\\u007f")  # the only one that JSON in ASCII leaves as it is


def _timestamp(record: logging.LogRecord) -> str:
    moment = datetime.fromtimestamp(record.created, UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")
