"""A server that passes requests on to another, and lies about the answers."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
from aiohttp import web

Documents = list[dict[str, Any]]


class Exchange:
    """A request, and the documents of its answer, to be changed in place."""

    def __init__(self, liar: Liar, path: str, body: dict[str, Any], documents: Documents) -> None:
        self.liar, self.path, self.body, self.documents = liar, path, body, documents
        self.status = 200
        self.in_events = self.unended = False

    @property
    def choices(self) -> Iterator[dict[str, Any]]:
        for document in self.documents:
            yield from document.get("choices", ())

    def garble(self, old: str = "", new: str = "~") -> None:
        """Change texts and ids."""
        for choice in self.choices:
            said = choice.get("message") or choice.get("delta") or choice
            name = "content" if said is not choice else "text"
            if isinstance(text := said.get(name), str) and old in text:
                said[name] = text.replace(old, new) if old else text + new
            choice["token_ids"] = [1 + token for token in choice.get("token_ids") or []]


Lie = Callable[[Exchange], None]


class Liar:
    """The server; `lie` changes each exchange."""

    def __init__(self, url: str, lie: Lie) -> None:
        self._url, self._lie = url, lie
        self.num_posts = self.num_open = self.most_open = 0  # most since there was none
        self.memory: dict[str, Any] = {}

    async def handle(self, request: web.Request) -> web.StreamResponse:
        body = await request.json() if request.can_read_body else {}
        self.num_posts += request.method == "POST"
        self.num_open += 1
        self.most_open = max(self.most_open, self.num_open)
        try:
            async with (
                aiohttp.ClientSession() as session,
                session.request(
                    request.method, self._url + request.path, json=body or None
                ) as answer,
            ):
                text, kind = await answer.text(), answer.content_type
            exchange = Exchange(self, request.path, body, _documents(text, kind))
            exchange.status, exchange.in_events = answer.status, kind == "text/event-stream"
            self._lie(exchange)
        finally:
            self.num_open -= 1
            self.most_open *= self.num_open > 0
        if exchange.in_events:
            lines = [f"data: {json.dumps(one)}\n\n" for one in exchange.documents]
            lines += [] if exchange.unended else ["data: [DONE]\n\n"]
            headers = {"content-type": "text/event-stream"}
            return web.Response(text="".join(lines), headers=headers)
        if not exchange.documents:
            return web.Response(text=self.memory.get("text", text), status=exchange.status)
        return web.json_response(exchange.documents[0], status=exchange.status)


def _documents(text: str, kind: str) -> Documents:
    if kind == "text/event-stream":
        lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
        return [json.loads(line) for line in lines if line != "[DONE]"]
    return [json.loads(text)] if kind == "application/json" else []


@asynccontextmanager
async def served_by(liar: Liar) -> AsyncIterator[str]:
    """Serve it, and yield its URL."""
    app = web.Application(client_max_size=1 << 24)
    app.router.add_route("*", "/{path:.*}", liar.handle)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()
