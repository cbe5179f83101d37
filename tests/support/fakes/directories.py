"""Places that tell which schedulers there are: a name server and an API of Kubernetes, on loopback."""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import dns.message
import dns.rcode
import dns.rrset
import trustme


class NameServer(asyncio.DatagramProtocol):
    """Answers questions of UDP with `records`, by name and type; a name without any is unknown."""

    def __init__(self) -> None:
        self.records: dict[tuple[str, str], list[str]] = {}
        self.fault = ""  # "silent", or the name of a response code
        self.num_asked = 0

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self.address = "{}:{}".format(*transport.get_extra_info("sockname"))

    def datagram_received(self, data: bytes, addr: Any) -> None:
        self.num_asked += 1
        if self.fault == "silent":
            return
        query = dns.message.from_wire(data)
        (asked,) = query.question
        name, kind = asked.name.to_text(omit_final_dot=True), asked.rdtype.name
        reply = dns.message.make_response(query)
        found = self.records.get((name, kind), [])
        if found:
            reply.answer.append(dns.rrset.from_text(asked.name, 5, "IN", kind, *found))
        elif self.fault or name not in {known for known, _ in self.records}:
            reply.set_rcode(dns.rcode.from_text(self.fault or "NXDOMAIN"))
        self._transport.sendto(reply.to_wire(), addr)


@contextlib.asynccontextmanager
async def name_server() -> AsyncIterator[NameServer]:
    """A server that knows no name yet."""
    loop = asyncio.get_running_loop()
    transport, server = await loop.create_datagram_endpoint(NameServer, ("127.0.0.1", 0))
    try:
        yield server
    finally:
        transport.close()


def endpoint_slice(
    name: str, *hosts: str, family: str = "IPv4", ports: Sequence[str] = ("grpc",), ends: str = ""
) -> dict[str, Any]:
    """A slice of `hosts`, of which `ends` is about to; its ports count from 50051."""
    endpoints = [{"addresses": [h], "conditions": {"terminating": h == ends}} for h in hosts]
    listed = [{"name": port, "port": 50051 + number} for number, port in enumerate(ports)]
    return {
        "metadata": {"name": name, "resourceVersion": "1"},
        "addressType": family,
        "endpoints": endpoints or None,
        "ports": listed,
    }


class KubernetesApi:
    """Lists `slices`, a page each, and sends `events` to the one that watches."""

    def __init__(self, account: Path) -> None:
        """Write what a pod is given into the folder `account`."""
        self.slices: list[dict[str, Any]] = []
        self.status = 200  # of every answer
        self.slow = False  # there is none
        self.asked: list[dict[str, list[str]]] = []
        self.tokens: list[str] = []
        self.watchers: asyncio.Queue[asyncio.StreamWriter] = asyncio.Queue()
        authority = trustme.CA()
        authority.cert_pem.write_to_path(str(account / "ca.crt"))
        (account / "token").write_text("first\n")
        self._context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        authority.issue_cert("127.0.0.1").configure_cert(self._context)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[int]:
        """Its port."""
        server = await asyncio.start_server(self._answer, "127.0.0.1", 0, ssl=self._context)
        try:
            yield server.sockets[0].getsockname()[1]
        finally:
            server.close()

    async def send(self, watcher: asyncio.StreamWriter, kind: str, changed: dict[str, Any]) -> None:
        """Send an event; a watcher that is gone does not hear it."""
        line = json.dumps({"type": kind, "object": changed}).encode() + b"\n"
        watcher.write(b"%x\r\n%b\r\n" % (len(line), line))
        await watcher.drain()

    async def end(self, watcher: asyncio.StreamWriter) -> None:
        """End a watch as the API server does after its time."""
        watcher.write(b"0\r\n\r\n")
        await watcher.drain()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
                query = parse_qs(urlsplit(head[0].split(" ")[1]).query)
                self.asked.append(query)
                self.tokens += [one.split()[-1] for one in head if one.startswith("authorization")]
                await self._answer_one(query, writer)

    async def _answer_one(self, query: dict[str, list[str]], writer: asyncio.StreamWriter) -> None:
        if self.slow:
            return
        if "watch" in query and self.status == 200:
            writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
            await writer.drain()
            await self.watchers.put(writer)
            return
        page = int(query.get("continue", ["0"])[0])
        more = str(page + 1) if page + 1 < len(self.slices) else ""
        listed = {
            "metadata": {"resourceVersion": "7", "continue": more},
            "items": self.slices[page : page + 1],
        }
        body = json.dumps(listed).encode()
        writer.write(
            b"HTTP/1.1 %d -\r\ncontent-length: %d\r\n\r\n%b" % (self.status, len(body), body)
        )
        await writer.drain()
