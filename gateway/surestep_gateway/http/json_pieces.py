"""Large JSON bodies in pieces, built and sent piece by piece and never copied as a whole."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import orjson
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from .answers import Answers

_PIECE_BYTES = 256 << 10


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

    def __init__(self, pieces: Iterable[bytes | bytearray], answers: Answers) -> None:
        self._pieces = [piece for piece in pieces if piece]
        super().__init__(None)
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
