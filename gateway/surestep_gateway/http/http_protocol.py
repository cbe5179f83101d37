"""HTTP/1.1 on a socket, with limits on the size and the duration of a client's requests."""

from __future__ import annotations

import contextlib
import math
import re
import select
import socket
import struct
import time
from typing import Any, NamedTuple

import httptools
import orjson
from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)

from surestep_gateway.http.listener import Connections, Progress

from .errors import error_content

MAX_HEAD_BYTES = 64 << 10  # request line and headers, or the trailers of a body
MAX_HEADERS = 128
MAX_AHEAD = 128  # requests that wait behind one that is not answered yet
_INVALID = 400, "Invalid HTTP request received."
_HEAD_TOO_LARGE = 431, f"a head may have {MAX_HEADERS} headers and {MAX_HEAD_BYTES} bytes"
_AMBIGUOUS = 400, "a head needs one valid Host header, and one way to tell the body's length"
_TOO_FAR_AHEAD = 400, f"at most {MAX_AHEAD} requests may be sent ahead"
_VERSIONS = ("1.0", "1.1")
_HOST = re.compile(rb"[\w.~!$&'()*+;=%:\[\]-]*")  # of RFC 3986, without the comma of lists
_RESET = struct.pack("ii", 1, 0)  # linger for no time


class ClientTimeouts(NamedTuple):
    """Limits on the time that a client takes, in seconds."""

    head_s: float  # for a head: from the connection or its own first byte
    keep_alive_s: float  # from a response to the first byte of the next request
    send_s: float  # to take what is sent to it


class _Parser(httptools.HttpRequestParser):
    """Leaves a request that asks for another protocol to `HttpProtocol.ignore_upgrade`."""

    def __init__(self, protocol: HttpProtocol) -> None:
        super().__init__(protocol)
        self.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn does
        self._ignore_upgrade = protocol.ignore_upgrade

    def feed_data(self, data: Any) -> None:
        try:
            super().feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._ignore_upgrade(data[upgrade.args[0] :])


class HttpProtocol(HttpToolsProtocol):
    """Extends uvicorn's protocol, which limits neither the size of a head nor any duration.

    Malformed HTTP gets an error in the usual shape. In the state of a request's scope, `abort` ends
    the connection at once, `is_gone` tells whether the client has ended it, and `certified` is
    whether the client has presented a certificate.
    """

    def __init__(
        self, connections: Connections, timeouts: ClientTimeouts, *args: Any, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self.parser = _Parser(self)
        self._all = connections
        self._timeouts = timeouts
        self._head_bytes = 0  # of the head that is being read, about
        self._num_headers = 0
        self._in_head = False
        self._complaint = _INVALID  # the response to bytes that are refused
        self._certified = False
        self._head_due = math.inf  # when the head of a request must be there
        self._send_due = math.inf  # when the client must have taken what waits to be sent
        self._running: RequestResponseCycle | None = None  # others may wait behind it
        self._leaving = Progress(timeouts.send_s)  # of the bytes that are left to a closed one

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        tls = transport.get_extra_info("ssl_object")
        self._certified = tls is not None and tls.getpeercert(binary_form=True) is not None
        self._all.opened(self)
        self._wait_for_head(self._timeouts.head_s)

    def connection_lost(self, exc: Exception | None) -> None:
        self._all.closed(self)
        if self._running is not None and not self._running.response_complete:
            self._running.disconnected = True  # uvicorn notifies the latest request alone
            self._running.message_event.set()
        super().connection_lost(exc)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    def overdue(self, now: float) -> str | None:
        """Return why this connection must be closed now, None if it need not."""
        if self.transport.is_closing():
            left: int = self.transport.get_write_buffer_size()
            return "send" if self._leaving.stalled(left, now) else None
        if now > self._send_due:
            return "send"
        return "head" if now > self._head_due and self._idle else None

    @property
    def _idle(self) -> bool:
        """Return whether all requests so far have responses; pipelined ones have their time after
        that.
        """
        return self.cycle is None or self.cycle.response_complete

    def close(self) -> None:
        """Close the connection once everything sent has been read."""
        self.transport.close()

    def abort(self) -> None:
        """Close the connection at once and drop what the client has not read."""
        raw = self.transport.get_extra_info("socket")
        if raw is not None:
            with contextlib.suppress(OSError):  # it is gone already
                raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        self.transport.abort()
        if self._running is not None:
            self._running.disconnected = True  # its further output is dropped

    def is_gone(self) -> bool:
        """Return whether the client has ended the connection, though nothing was read of it yet."""
        if self.transport.is_closing():
            return True
        poll = select.poll()
        poll.register(self.transport.get_extra_info("socket").fileno(), select.POLLRDHUP)
        return bool(poll.poll(0))  # which tells of resets unasked

    def pause_writing(self) -> None:
        super().pause_writing()
        self._send_due = time.monotonic() + self._timeouts.send_s

    def resume_writing(self) -> None:
        super().resume_writing()
        self._send_due = math.inf

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._in_head and not self.transport.is_closing():
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:  # one header without an end
                self._complaint = _HEAD_TOO_LARGE
                self.send_400_response("")

    def on_message_begin(self) -> None:
        if len(self.pipeline) >= MAX_AHEAD:
            self._complaint = _TOO_FAR_AHEAD
            raise ValueError("too many requests were sent ahead")  # to the parser, as below
        self._in_head = True
        self._head_bytes = self._num_headers = 0
        self._head_due = time.monotonic() + self._timeouts.head_s
        super().on_message_begin()
        self.scope["state"]["abort"] = self.abort
        self.scope["state"]["is_gone"] = self.is_gone
        self.scope["state"]["certified"] = self._certified

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._num_headers += 1
        self._count(len(name) + len(value))
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if not self._has_one_meaning():
            self._complaint = _AMBIGUOUS
            raise ValueError("the head is ambiguous")  # to the parser
        self._in_head = False
        self._head_due = math.inf
        self._all.busy(self)
        super().on_headers_complete()

    def _has_one_meaning(self) -> bool:
        """Return whether no proxy can read another host, or another end of the body (RFC 9112)."""
        if self.parser.get_method() == b"CONNECT":
            return False  # what follows is for another server
        version = self.parser.get_http_version()
        hosts = self._values(b"host")
        lengths, encodings = self._values(b"content-length"), self._values(b"transfer-encoding")
        if version not in _VERSIONS or len(hosts) > 1 or (version == "1.1" and not hosts):
            return False
        if not all(map(_HOST.fullmatch, hosts)) or len(lengths) + len(encodings) > 1:
            return False
        chunked = version == "1.1" and all(name.lower() == b"chunked" for name in encodings)
        return all(map(bytes.isdigit, lengths)) and (chunked or not encodings)

    def ignore_upgrade(self, rest: bytes) -> None:
        """Read the head once more, without its Upgrade header, and `rest` as what follows it.

        RFC 9110, 7.8 lets a server ignore that header. The parser does not: for it the request
        ends with the head, and what follows is the other protocol's.
        """
        version = self.parser.get_http_version().encode()
        lines = [b"%s %s HTTP/%s" % (self.parser.get_method(), self.url, version)]
        lines += [b"%s: %s" % field for field in self.headers if field[0] != b"upgrade"]
        self.parser = _Parser(self)  # the old one is done if the connection is not to be kept
        self.parser.feed_data(b"\r\n".join([*lines, b"", rest]))

    def _should_upgrade(self) -> bool:
        """Have uvicorn start nothing for a head that is read once more."""
        return True

    def _values(self, name: bytes) -> list[bytes]:
        return [value.strip() for known, value in self.headers if known == name]

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._idle:
            self._wait_for_head(self._timeouts.keep_alive_s)

    def _wait_for_head(self, timeout_s: float) -> None:
        self._head_due = time.monotonic() + timeout_s
        self._all.idle(self)

    def _count(self, size: int) -> None:
        """Raise ValueError, at which the parser gives up the connection."""
        self._head_bytes += size
        if self._head_bytes > MAX_HEAD_BYTES or self._num_headers > MAX_HEADERS:
            self._complaint = _HEAD_TOO_LARGE
            raise ValueError("the head is too large")

    def send_400_response(self, msg: str) -> None:
        """Respond to malformed input and close."""
        status, message = self._complaint
        body = orjson.dumps(error_content(message, "invalid_request_error", None, "invalid_http"))
        lines = (
            b"content-type: application/json",
            b"content-length: %d" % len(body),
            b"connection: close",
        )
        self.transport.write(STATUS_LINE[status] + b"\r\n".join(lines) + b"\r\n\r\n" + body)
        self.transport.close()
