"""Logging, configured once per process: service and rank on every line, JSON on request."""

from __future__ import annotations

import json
import logging
import sys
import time
from contextvars import ContextVar
from datetime import UTC, datetime

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


class _LineFormatter(logging.Formatter):
    """`2026-01-31T12:00:00.123Z INFO gateway surestep_gateway.app [request-id] message`."""

    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        request = request_id.get()
        tag = f"[{request}] " if request is not None else ""
        head = f"{_timestamp(record)} {record.levelname} {self._service} {record.name}"
        return f"{head} {tag}{super().format(record)}"


class _JsonFormatter(logging.Formatter):
    """One object per line; keys that do not apply are left out."""

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
        return json.dumps({key: value for key, value in fields.items() if value is not None})


def _timestamp(record: logging.LogRecord) -> str:
    moment = datetime.fromtimestamp(record.created, UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")
