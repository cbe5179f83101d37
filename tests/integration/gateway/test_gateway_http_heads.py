"""Heads that two readers of one connection could understand differently are refused."""

from __future__ import annotations

import asyncio
import json
import re

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


async def said(stack: Stack, data: bytes) -> bytes:
    """Everything the server answers before it closes the connection."""
    host, _, port = stack.server.address.rpartition(":")
    reader, writer = await connect((host, int(port)))
    writer.write(data)
    try:
        async with asyncio.timeout(PATIENCE_S):
            return await everything(reader)
    finally:
        writer.close()


@pytest.mark.parametrize("head", REFUSED.values(), ids=REFUSED.keys())
async def test_what_could_be_read_in_two_ways_is_refused(stack: Stack, head: bytes) -> None:
    """With 400, after which nothing on the connection is read: it could be a part of a body."""
    answers = await said(stack, head + NEXT)
    assert re.findall(rb"HTTP/1.1 (\d{3})", answers) == [b"400"]
    error = json.loads(answers.rpartition(b"\r\n\r\n")[2])["error"]
    assert error["code"] == "invalid_http"


@pytest.mark.parametrize("request_", SERVED.values(), ids=SERVED.keys())
async def test_what_has_one_meaning_is_served(stack: Stack, request_: bytes) -> None:
    assert (await said(stack, request_)).startswith(b"HTTP/1.1 200")
