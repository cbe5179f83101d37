"""HTTP/1.1 on a socket, with bounds on what a client may send before it is answered at all."""

from __future__ import annotations

import asyncio
from typing import Any

import orjson
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from .errors import error_content

MAX_HEAD_BYTES = 64 << 10  # request line and headers
MAX_HEADERS = 128
HEAD_TIMEOUT_S = 30.0  # from its first byte to its last


class HttpProtocol(HttpToolsProtocol):
    """uvicorn's, which bounds neither the size of a head nor the time it takes.

    What is no HTTP gets an error in the shape of all others.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._head_bytes = 0  # of the head that is being read, about
        self._num_headers = 0
        self._in_head = False
        self._too_large = False
        self._timer: asyncio.TimerHandle | None = None

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._in_head and self._timer is None:
            self._timer = self.loop.call_later(HEAD_TIMEOUT_S, self.transport.close)
        if self._in_head and not self.transport.is_closing():
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:  # one header without an end
                self._too_large = True
                self.send_400_response("")

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_head()
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        self._in_head = True
        self._head_bytes = self._num_headers = 0
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._num_headers += 1
        self._count(len(name) + len(value))
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._end_head()
        super().on_headers_complete()

    def _end_head(self) -> None:
        self._in_head = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _count(self, size: int) -> None:
        """Raises ValueError, which the parser takes for the end of the connection."""
        self._head_bytes += size
        if self._head_bytes > MAX_HEAD_BYTES or self._num_headers > MAX_HEADERS:
            self._too_large = True
            raise ValueError("the head is too large")

    def send_400_response(self, msg: str) -> None:
        """Answer what cannot be read, and close."""
        status = 431 if self._too_large else 400
        if self._too_large:
            msg = f"a head may have {MAX_HEADERS} headers and {MAX_HEAD_BYTES} bytes"
        body = orjson.dumps(error_content(msg, "invalid_request_error", None, status))
        lines = (
            b"content-type: application/json",
            b"content-length: %d" % len(body),
            b"connection: close",
        )
        self.transport.write(STATUS_LINE[status] + b"\r\n".join(lines) + b"\r\n\r\n" + body)
        self.transport.close()
