"""Bodies of requests and of responses, bounded in time and in their total memory.

A body must arrive at a minimum rate. When a new body does not fit into the memory for all of them,
the one that has been arriving for longest is given up: slow senders lose, honest ones win. Large
JSON bodies of responses are built and sent piece by piece and never copied as a whole.
"""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import secrets
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import orjson
from starlette.responses import Response
from starlette.types import Receive, Scope, Send
from surestep_common.errors import Cancelled, ClientTooSlow, RequestTooLarge, Unavailable
from surestep_common.process import memory_bytes

from surestep_gateway.http.admission import check_json
from surestep_gateway.settings.config import GatewaySettings

BYTES_PER_S = 64 << 10  # at least, of a body that takes longer than its time
SMALL_BYTES = 64 << 10  # of every body: always have room, as the number of connections is bounded
_LARGEST_AT_ONCE = 4  # so many of the largest responses may be on their way
_LEAST_BYTES_PER_S = 64 << 10  # of a response
_PIECE_BYTES = 256 << 10  # sent before others have a turn


class BodyLimits(NamedTuple):
    body_bytes: int  # of one body
    total_bytes: int  # of all, less SMALL_BYTES for each
    timeout_s: float  # for a body to arrive, and longer by what has come
    bytes_per_s: int  # divided by this

    @classmethod
    def of(cls, settings: GatewaySettings) -> BodyLimits:
        total = settings.max_total_body_bytes or min(1 << 30, memory_bytes() // 4)
        largest = min(settings.max_body_bytes, total + SMALL_BYTES)
        return cls(largest, total, settings.body_timeout_s, BYTES_PER_S)


class Bodies:
    """The bodies in memory of one gateway."""

    def __init__(self, limits: BodyLimits) -> None:
        self.limits = limits
        self.num_bytes = 0  # in memory that count
        self.arriving: dict[BodyReader, None] = {}  # the longest arriving first

    def make_room(self, asking: BodyReader, size: int) -> bool:
        """Return whether `size` more bytes of a body fit, after giving up slower bodies if
        needed.
        """
        while self.num_bytes + size > self.limits.total_bytes:
            slowest = next((body for body in self.arriving if body.counted), asking)
            if slowest is asking:
                return False
            slowest.give_up()
        self.num_bytes += size
        return True


class BodyReader:
    """A body. Its bytes count among those in memory from `read` until `release`."""

    def __init__(self, bodies: Bodies, receive: Receive, headers: Mapping[bytes, bytes]) -> None:
        """Raise RequestTooLarge when the headers announce too large a body."""
        self._bodies = bodies
        self._receive = receive
        self._headers = headers
        self._deadline: asyncio.Timeout | None = None
        self._given_up = False
        self._complete = False
        self.data = bytearray()  # empty again once it is released
        self.counted = 0  # of its bytes, among those in memory
        limit = bodies.limits.body_bytes
        declared = headers.get(b"content-length", b"")[:20]
        if declared.isdigit() and int(declared) > limit:
            raise RequestTooLarge(f"the body must have at most {limit} bytes, got {int(declared)}")

    async def read(self) -> None:
        """Wait for the whole body, which must be JSON. A byte order mark before it is dropped.

        Of counted requests it is there when their route runs: another call changes nothing.
        Raise UnsupportedMediaType, RequestTooLarge, ClientTooSlow, Unavailable when there is no
        memory for it, and Cancelled when its sender has disconnected.
        """
        if self._complete:
            return
        check_json(self._headers)
        self._bodies.arriving[self] = None
        try:
            await self._read()
            self._complete = True
            if self.data.startswith(codecs.BOM_UTF8):
                del self.data[: len(codecs.BOM_UTF8)]
        except BaseException:
            self.release()
            raise
        finally:
            del self._bodies.arriving[self]

    async def _read(self) -> None:
        limits = self._bodies.limits
        began = asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout_at(began + limits.timeout_s) as self._deadline:
                while await self._more():
                    due = began + limits.timeout_s + len(self.data) / limits.bytes_per_s
                    self._deadline.reschedule(due)
        except TimeoutError:
            if self._given_up:
                raise _no_memory() from None
            raise ClientTooSlow("the body did not arrive in time") from None

    async def _more(self) -> bool:
        """Receive one chunk and return whether more follow."""
        message = await self._receive()
        if message["type"] == "http.disconnect":
            raise Cancelled("the client went away")
        self._add(message.get("body", b""))
        return bool(message.get("more_body", False))

    def _add(self, piece: bytes) -> None:
        limits = self._bodies.limits
        size = len(self.data) + len(piece)
        if size > limits.body_bytes:
            raise RequestTooLarge(f"the body must have at most {limits.body_bytes} bytes")
        more = max(0, size - SMALL_BYTES) - self.counted
        if self._given_up or (more and not self._bodies.make_room(self, more)):
            raise _no_memory()
        self.counted += more
        self.data += piece

    def give_up(self) -> None:
        """End `read` with an error, to make room."""
        self._given_up = True
        self.release()
        assert self._deadline is not None, "only a body that arrives has bytes"
        with contextlib.suppress(RuntimeError):  # it is over already
            self._deadline.reschedule(0)

    def release(self) -> None:
        self.data = bytearray()
        self._bodies.num_bytes -= self.counted
        self.counted = 0


def _no_memory() -> Unavailable:
    return Unavailable("the memory for request bodies is full", retry_after=1.0)


class Answers:
    """The whole responses that one gateway is sending.

    When a new one does not fit beside the others, the one that has been on its way for longest is
    given up: slow readers lose, honest ones win.
    """

    def __init__(self, settings: GatewaySettings) -> None:
        self._limit = _LARGEST_AT_ONCE * settings.max_answer_bytes
        self._send_timeout_s = settings.send_timeout_s
        self._sending: dict[asyncio.Timeout, int] = {}  # bytes of each, the oldest first

    @contextlib.asynccontextmanager
    async def sending(self, size: int) -> AsyncIterator[None]:
        """Account for a response of `size` bytes while it is sent.

        Raise TimeoutError when the client has had the timeout and a second for every 64 KiB, or
        when other responses need the room.
        """
        async with asyncio.timeout(self._send_timeout_s + size / _LEAST_BYTES_PER_S) as deadline:
            self._make_room(size)
            self._sending[deadline] = size
            try:
                yield
            finally:
                self._sending.pop(deadline, None)

    def _make_room(self, size: int) -> None:
        while self._sending and sum(self._sending.values()) + size > self._limit:
            slowest = next(iter(self._sending))
            del self._sending[slowest]
            with contextlib.suppress(RuntimeError):  # it is over already
                slowest.reschedule(0)


class RawJson:
    """A value that is JSON text already."""

    def __init__(self, data: bytes | bytearray) -> None:
        self.data = data


class GrowingLists:
    """Lists that grow together, as JSON text."""

    def __init__(self) -> None:
        self._texts: dict[str, bytearray] = {}
        self.num_bytes = 0

    def extend(self, more: Mapping[str, Sequence[Any]]) -> None:
        """Append new elements to each list."""
        for name, values in more.items():
            text = self._texts.setdefault(name, bytearray(b"["))
            if values:
                data = orjson.dumps(values)[1:-1]
                text += b"," + data if len(text) > 1 else data
                self.num_bytes += len(data)

    def finish(self) -> dict[str, RawJson]:
        """Return the lists, which must not grow any more."""
        for text in self._texts.values():
            text += b"]"
        return {name: RawJson(text) for name, text in self._texts.items()}


def json_pieces(content: Any) -> list[bytes | bytearray]:
    """Return the JSON text of a value that may contain RawJson."""
    raw: list[RawJson] = []
    mark = secrets.token_hex(16)  # no client can have written it

    def default(value: Any) -> str:
        if not isinstance(value, RawJson):
            raise TypeError(type(value).__name__)
        raw.append(value)
        return mark

    text = orjson.dumps(content, default=default)
    if not raw:
        return [text]
    first, *rest = text.split(b'"%b"' % mark.encode())
    pieces: list[bytes | bytearray] = [first]
    for value, after in zip(raw, rest, strict=True):
        pieces += value.data, after
    return pieces


class JsonPieces(Response):
    """A JSON body sent as fast as the client reads it, yielding to other tasks in between."""

    media_type = "application/json"

    def __init__(
        self,
        pieces: Iterable[bytes | bytearray],
        answers: Answers,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self._pieces = [piece for piece in pieces if piece]
        super().__init__(None, headers=headers)
        self._answers = answers
        self._size = sum(map(len, self._pieces))
        self.headers["content-length"] = str(self._size)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with self._answers.sending(self._size):
                await self._send_all(send)
        except TimeoutError:
            scope["state"]["abort"]()

    async def _send_all(self, send: Send) -> None:
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await send(start)
        await send_pieces(send, self._pieces, more_body=False)


async def send_pieces(send: Send, pieces: Sequence[bytes | bytearray], *, more_body: bool) -> None:
    """Send part of a body; large pieces in several parts, yielding to other tasks in between."""
    for number, piece in enumerate(pieces, start=1):
        at, view = 0, memoryview(piece)
        while len(view) - at > _PIECE_BYTES:
            data = bytes(view[at : at + _PIECE_BYTES])
            await send({"type": "http.response.body", "body": data, "more_body": True})
            await asyncio.sleep(0)
            at += _PIECE_BYTES
        more = more_body or number < len(pieces)
        await send({"type": "http.response.body", "body": bytes(view[at:]), "more_body": more})
