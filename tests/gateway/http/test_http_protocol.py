"""Heads that two readers of one connection could understand differently are refused."""

from __future__ import annotations

import asyncio
import json
import re
import socket

import pytest
from slow_clients import connect, everything
from support.patience import PATIENCE_S
from support.processes.gateway_stack import Stack

NEXT = b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
POST = b"POST /tokenize HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
BODY = b'{"prompt": "x"}'
LENGTH = b"content-length: %d\r\n" % len(BODY)
CHUNKED = b"transfer-encoding: chunked\r\n"
CHUNKS = b"%x\r\n%s\r\n0\r\n\r\n" % (len(BODY), BODY)

# As Java's HttpClient (JDK 17) sends it: the head, and the body in a packet of its own.
JAVA = (
    b"POST /tokenize HTTP/1.1\r\n"
    b"Connection: Upgrade, HTTP2-Settings\r\n"
    b"Content-Length: 15\r\n"
    b"Host: 127.0.0.1:8000\r\n"
    b"HTTP2-Settings: AAEAAEAAAAIAAAAAAAMAAAAAAAQBAAAAAAUAAEAAAAYABgAA\r\n"
    b"Upgrade: h2c\r\n"
    b"User-Agent: Java-http-client/17.0.15\r\n"
    b"Content-Type: application/json\r\n\r\n"
)
UPGRADE = b"connection: upgrade\r\nupgrade: h2c\r\n"
SMUGGLED = b"GET /smuggled HTTP/1.1\r\nhost: x\r\n\r\n"

REFUSED = {
    "no host": b"GET /health HTTP/1.1\r\n\r\n",
    "no host, absolute target": b"GET http://x/health HTTP/1.1\r\n\r\n",
    "no host, options of the server": b"OPTIONS * HTTP/1.1\r\n\r\n",
    "no host, with a body": POST.replace(b"host: x\r\n", b"") + LENGTH + b"\r\n" + BODY,
    "two hosts": b"GET /health HTTP/1.1\r\nhost: x\r\nhost: y\r\n\r\n",
    "one host twice": b"GET /health HTTP/1.1\r\nhost: x\r\nHOST: x\r\n\r\n",
    "two hosts, HTTP/1.0": b"GET /health HTTP/1.0\r\nhost: x\r\nhost: y\r\n\r\n",
    "a list of hosts": b"GET /health HTTP/1.1\r\nhost: x, y\r\n\r\n",
    "a host with a path": b"GET /health HTTP/1.1\r\nhost: x/y\r\n\r\n",
    "a host with a user": b"GET /health HTTP/1.1\r\nhost: u@x\r\n\r\n",
    "a host that is no text": b"GET /health HTTP/1.1\r\nhost: \xff\r\n\r\n",
    "a host on two lines": b"GET /health HTTP/1.1\r\nhost: x\r\n y\r\n\r\n",
    "a blank behind the name": b"GET /health HTTP/1.1\r\nhost : x\r\n\r\n",
    "HTTP/0.9": b"GET /health\r\n\r\n",
    "HTTP/0.9, by its name": b"GET /health HTTP/0.9\r\nhost: x\r\n\r\n",
    "HTTP/1.2": b"GET /health HTTP/1.2\r\nhost: x\r\n\r\n",
    "HTTP/2.0": b"GET /health HTTP/2.0\r\nhost: x\r\n\r\n",
    "HTTP/2, by its preface": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "length and chunks": POST + LENGTH + CHUNKED + b"\r\n" + CHUNKS,
    "chunks and length": POST + CHUNKED + LENGTH + b"\r\n" + CHUNKS,
    "two lengths": POST + LENGTH + b"content-length: 3\r\n\r\n" + BODY,
    "one length twice": POST + LENGTH * 2 + b"\r\n" + BODY,
    "a list of lengths": POST + b"content-length: 15, 15\r\n\r\n" + BODY,
    "a signed length": POST + b"content-length: +15\r\n\r\n" + BODY,
    "a length in hexadecimal": POST + b"content-length: 0xf\r\n\r\n" + BODY,
    "no length": POST + b"content-length: \r\n\r\n" + BODY,
    "an endless length": POST + b"content-length: 99999999999999999999\r\n\r\n" + BODY,
    "another encoding": POST + b"transfer-encoding: gzip\r\n\r\n" + CHUNKS,
    "no encoding": POST + b"transfer-encoding: identity\r\n\r\n" + CHUNKS,
    "an encoding behind chunks": POST + b"transfer-encoding: chunked, gzip\r\n\r\n" + CHUNKS,
    "an encoding below chunks": POST + b"transfer-encoding: gzip, chunked\r\n\r\n" + CHUNKS,
    "chunks twice": POST + CHUNKED * 2 + b"\r\n" + CHUNKS,
    "nearly chunked": POST + b"transfer-encoding: xchunked\r\n\r\n" + CHUNKS,
    "chunked with a tail": POST + b"transfer-encoding: chunked;x=1\r\n\r\n" + CHUNKS,
    "chunks, HTTP/1.0": POST.replace(b"1.1", b"1.0") + CHUNKED + b"\r\n" + CHUNKS,
    "a chunk without a size": POST + CHUNKED + b"\r\n\r\n" + CHUNKS,
    "a chunk with a signed size": POST + CHUNKED + b"\r\n+" + CHUNKS,
    "a line that ends in CR alone": b"GET /health HTTP/1.1\rhost: x\r\r",
    "a tunnel": b"CONNECT x:80 HTTP/1.1\r\nhost: x:80\r\n\r\n",
    "an upgrade with length and chunks": POST + UPGRADE + LENGTH + CHUNKED + b"\r\n" + CHUNKS,
    "an upgrade with two lengths": POST + UPGRADE + LENGTH * 2 + b"\r\n" + BODY,
    "an upgrade without host": b"GET /health HTTP/1.1\r\n" + UPGRADE + b"\r\n",
    "a NUL in a value": b"GET /health HTTP/1.1\r\nhost: x\r\nx: a\0b\r\n\r\n",
}
SERVED = {
    "HTTP/1.0 without host": b"GET /health HTTP/1.0\r\n\r\n",
    "an empty host": b"GET /health HTTP/1.1\r\nhost:\r\nconnection: close\r\n\r\n",
    "an address": b"GET /health HTTP/1.1\r\nhost: [::1]:8000\r\nconnection: close\r\n\r\n",
    "a name": b"GET /health HTTP/1.1\r\nHost: my_host-1.example.:80\r\nConnection: close\r\n\r\n",
    "a length": POST + LENGTH + b"connection: close\r\n\r\n" + BODY,
    "chunks": POST + b"Transfer-Encoding:  Chunked \r\nconnection: close\r\n\r\n" + CHUNKS,
}


async def said(stack: Stack, *packets: bytes) -> bytes:
    """Everything the server answers before it closes the connection."""
    host, _, port = stack.server.address.rpartition(":")
    reader, writer = await connect((host, int(port)))
    writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for packet in packets:
        writer.write(packet)
        for _ in range(16):  # the server, which runs in this loop, reads it before the next one
            await asyncio.sleep(0)
    try:
        async with asyncio.timeout(PATIENCE_S):
            return await everything(reader)
    finally:
        writer.close()


@pytest.mark.parametrize("head", REFUSED.values(), ids=REFUSED.keys())
@pytest.mark.rotates(1)
async def test_what_could_be_read_in_two_ways_is_refused(stack: Stack, head: bytes) -> None:
    """With 400, after which nothing on the connection is read: it could be a part of a body."""
    answers = await said(stack, head + NEXT)
    assert re.findall(rb"HTTP/1.1 (\d{3})", answers) == [b"400"]
    error = json.loads(answers.rpartition(b"\r\n\r\n")[2])["error"]
    assert error["code"] == "invalid_http"


UPGRADES = {
    "as Java sends it": (JAVA, BODY),
    "in pieces": tuple(bytes([byte]) for byte in JAVA + BODY),
    "at once": (JAVA + BODY,),
    "without a body": (b"GET /health HTTP/1.1\r\nhost: x\r\n" + UPGRADE + b"\r\n",),
    "in chunks": (POST + UPGRADE + CHUNKED + b"\r\n", CHUNKS),
    "to WebSocket": (POST + UPGRADE.replace(b"h2c", b"websocket") + LENGTH + b"\r\n", BODY),
    "to two protocols": (POST + UPGRADE + b"upgrade: x\r\n" + LENGTH + b"\r\n", BODY),
    "and an end": (
        POST + UPGRADE.replace(b"upgrade\r", b"close, Upgrade\r", 1) + LENGTH + b"\r\n",
        BODY,
    ),
    "with HTTP/1.0": (POST.replace(b"1.1", b"1.0") + UPGRADE + LENGTH + b"\r\n", BODY),
}


@pytest.mark.parametrize("packets", UPGRADES.values(), ids=UPGRADES.keys())
async def test_a_wish_for_another_protocol_is_ignored(
    stack: Stack, packets: tuple[bytes, ...]
) -> None:
    """The request is served as HTTP/1.1, with its body, and the connection goes on behind it."""
    answers = await said(stack, *packets, NEXT)
    served = 1 if b"HTTP/1.0" in packets[0] or b"close" in packets[0] else 2
    assert re.findall(rb"HTTP/1.1 (\d{3})", answers) == [b"200"] * served
    assert answers.count(b'"tokens"') == (b"POST" in b"".join(packets))


@pytest.mark.parametrize("protocol", [b"h2c", b"websocket"])
async def test_the_body_behind_an_upgrade_is_no_request(stack: Stack, protocol: bytes) -> None:
    head = POST + UPGRADE.replace(b"h2c", protocol) + b"content-length: %d\r\n\r\n"
    answers = await said(stack, head % len(SMUGGLED), SMUGGLED, NEXT)
    assert re.findall(rb"HTTP/1.1 (\d{3})", answers) == [b"400", b"200"]
    assert b"invalid_http" not in answers  # but a body that is not JSON


async def test_upgrades_are_bounded_in_number(stack: Stack) -> None:
    """Upgrades wait behind the first request, and are bounded as others are."""
    waiting = b"GET /health HTTP/1.1\r\nhost: x\r\n" + UPGRADE + b"\r\n"
    answers = await said(stack, waiting * 200)
    assert answers.endswith(b'"code":"invalid_http"}}')


@pytest.mark.parametrize("request_", SERVED.values(), ids=SERVED.keys())
async def test_what_has_one_meaning_is_served(stack: Stack, request_: bytes) -> None:
    assert (await said(stack, request_)).startswith(b"HTTP/1.1 200")
