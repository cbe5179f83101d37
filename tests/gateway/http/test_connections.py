"""Requests as HTTP allows them, and the bounds on connections and bodies."""

from __future__ import annotations

import asyncio
import json
import re
import resource
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
import trustme
from slow_clients import OPEN_BODY, Address, connect, everything, post, stop_reading
from support.fakes.scheduler import running, start, tokens
from support.patience import PATIENCE_S
from support.processes.gateway import gateway, until_ready
from support.processes.gateway_stack import Stack, StartStack
from support.processes.ports import free_port
from surestep_proto.scheduler_pb2 import LENGTH, GenerateChunk, GenerateRequest

BODY = json.dumps({"prompt": "hello", "max_tokens": 2}).encode()
HEALTH = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"
LAST = b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"


def address_of(stack: Stack) -> Address:
    host, _, port = stack.server.address.rpartition(":")
    return host, int(port)


async def talk(stack: Stack, data: bytes, *, eof: bool = False) -> bytes:
    """Everything the server says to these bytes."""
    reader, writer = await connect(address_of(stack))
    writer.write(data)
    if eof:
        writer.write_eof()
    try:
        async with asyncio.timeout(10):
            return await everything(reader)
    finally:
        writer.close()


def statuses(answers: bytes) -> list[int]:
    return [int(found) for found in re.findall(rb"HTTP/1.1 (\d{3})", answers)]


async def nothing_open(stack: Stack) -> None:
    await stack.scheduler.until(lambda fake: fake.num_open == 0)
    async with asyncio.timeout(PATIENCE_S):
        while stack.server.gateway.admission.num_open:
            await asyncio.sleep(0.01)


async def test_pipelined_requests_are_answered_in_order(stack: Stack) -> None:
    many = [post("/v1/completions", BODY), HEALTH, post("/tokenize", b'{"prompt": "x"}')] * 5
    answers = await talk(stack, b"".join(many) + LAST)
    assert statuses(answers) == [200] * 16
    kinds = re.findall(rb"text_completion|token_strs", answers)
    assert kinds == [b"text_completion", b"token_strs"] * 5


async def test_so_many_requests_may_be_sent_ahead(stack: Stack) -> None:
    answers = await talk(stack, HEALTH * 100 + LAST)
    assert statuses(answers) == [200] * 101
    answers = await talk(stack, HEALTH * 1000)
    assert 400 in statuses(answers)
    assert len(statuses(answers)) < 500
    assert b"sent ahead" in answers


async def test_a_client_that_pipelines_and_leaves_is_noticed(stack: Stack) -> None:
    stack.scheduler.script = endless
    body = json.dumps({"prompt": "hello", "max_tokens": 250, "stream": True}).encode()
    reader, writer = await connect(address_of(stack))
    writer.write(post("/v1/completions", body) + HEALTH * 3)
    assert (await reader.readline()).startswith(b"HTTP/1.1 200")
    writer.transport.abort()
    await nothing_open(stack)
    assert stack.scheduler.num_cancelled == 1


async def endless(request: GenerateRequest) -> AsyncIterator[GenerateChunk]:
    yield start()
    while True:
        yield tokens([70] * 50)
        await asyncio.sleep(0.01)


async def test_half_closed_clients_have_left(stack: Stack) -> None:
    """Nothing else tells that a client is gone, so no answer is computed for it."""
    stack.scheduler.script = endless
    await talk(stack, post("/v1/completions", BODY), eof=True)
    await nothing_open(stack)


async def test_bodies_that_wait_for_the_word(stack: Stack) -> None:
    reader, writer = await connect(address_of(stack))
    head = OPEN_BODY + b"content-length: %d\r\nexpect: 100-continue\r\n" % len(BODY)
    writer.write(head + b"connection: close\r\n\r\n")
    async with asyncio.timeout(10):
        assert (await reader.readline()) == b"HTTP/1.1 100 Continue\r\n"
        writer.write(BODY)
        assert statuses(await everything(reader)) == [200]
    writer.close()


async def test_chunks_of_one_byte(stack: Stack) -> None:
    chunks = b"".join(b"1;x=y\r\n%c\r\n" % byte for byte in BODY) + b"0\r\ntrailer: x\r\n\r\n"
    head = OPEN_BODY + b"transfer-encoding: chunked\r\nconnection: close\r\n\r\n"
    assert statuses(await talk(stack, head + chunks)) == [200]


async def test_http_1_0(stack: Stack) -> None:
    request = post("/v1/completions", BODY).replace(b"HTTP/1.1", b"HTTP/1.0")
    answer = await talk(stack, request)
    assert statuses(answer) == [200]
    assert b"connection: close" in answer


async def test_a_place_is_taken_when_the_body_is_there(start_stack: StartStack) -> None:
    stack = await start_stack(max_concurrent_requests=1)
    waiting = [await connect(address_of(stack)) for _ in range(3)]
    for _, writer in waiting:
        writer.write(OPEN_BODY + b"content-length: 1000\r\n\r\n{")
    for _ in range(3):
        assert (await stack.complete(max_tokens=1)).status_code == 200
    for _, writer in waiting:
        writer.close()


async def test_bodies_keep_a_least_rate(
    start_stack: StartStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("surestep_gateway.http.bodies.BYTES_PER_S", 1000)
    stack = await start_stack(body_timeout_s=0.2)
    answer = await talk(stack, OPEN_BODY + b"content-length: 1000\r\n\r\n{")
    assert statuses(answer) == [408]
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["type"] == "timeout_error"
    reader, writer = await connect(address_of(stack))
    padded = BODY + b" " * 2000  # two more seconds by its bytes
    writer.write(OPEN_BODY + b"connection: close\r\ncontent-length: %d\r\n\r\n" % len(padded))
    writer.write(padded[:-1])
    await asyncio.sleep(0.5)  # longer than a body may take that does not come at all
    writer.write(padded[-1:])
    assert statuses(await everything(reader)) == [200]
    writer.close()


async def test_the_slowest_body_makes_room(start_stack: StartStack) -> None:
    """A body that fits beside the others is served however many slow ones came before."""
    stack = await start_stack(max_total_body_bytes=1_000_000)
    slow = []
    for _ in range(4):
        reader, writer = await connect(address_of(stack))
        writer.write(OPEN_BODY + b"content-length: 900000\r\n\r\n" + b" " * 400_000)
        slow.append((reader, writer))
    prompt = {"prompt": "x", "max_tokens": 1, "metadata": "y" * 700_000}
    for _ in range(3):
        answer = await stack.client.post("/v1/completions", json=prompt)
        assert answer.status_code == 200, answer.text
    async with asyncio.timeout(10):
        for reader, _ in slow[:2]:
            assert b" 503 " in await reader.readline()
    for _, writer in slow:
        writer.close()
    huge = await stack.client.post("/v1/completions", json=prompt | {"metadata": "y" * 1_100_000})
    assert huge.status_code == 413, huge.text


async def test_idle_connections_make_room_and_busy_ones_stay(start_stack: StartStack) -> None:
    stack = await start_stack(max_connections=5)
    stack.scheduler.script = endless
    idle = [await connect(address_of(stack)) for _ in range(4)]
    body = json.dumps({"prompt": "hello", "max_tokens": 250, "stream": True}).encode()
    busy = []
    for _ in range(5):
        reader, writer = await connect(address_of(stack))
        writer.write(post("/v1/completions", body))
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        busy.append((reader, writer))
    assert statuses(await talk(stack, HEALTH)) == [503]
    for reader, writer in idle:
        assert await everything(reader) == b""
        writer.close()
    for reader, writer in busy:
        assert await reader.readline()
        writer.close()
    await nothing_open(stack)
    assert (await stack.client.get("/health")).status_code == 200


async def test_silent_tls_handshakes_end(
    start_stack: StartStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("surestep_gateway.server.HEAD_TIMEOUT_S", 0.3)
    authority = trustme.CA()
    made = authority.issue_cert("127.0.0.1")
    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    made.cert_chain_pems[0].write_to_path(certificate)
    made.private_key_pem.write_to_path(key)
    files = {"ssl_certfile": certificate, "ssl_keyfile": key}
    stack = await start_stack(**files, max_connections=3)
    silent = [await connect(address_of(stack)) for _ in range(8)]
    async with asyncio.timeout(10):
        for reader, writer in silent:
            assert await everything(reader) == b""
            writer.close()


async def test_no_descriptors_are_left(model: Path) -> None:
    """A log line says so, and whoever asks for something is served all the same."""
    port = free_port()
    async with (
        running() as scheduler,
        gateway(model, port, scheduler.port) as process,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=20) as client,
    ):
        assert process.stderr is not None
        await until_ready(client, process)
        held = len(list(Path(f"/proc/{process.pid}/fd").iterdir()))
        resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (held + 8, held + 8))
        silent = [await connect(("127.0.0.1", port)) for _ in range(30)]
        headers = {"connection": "close"}
        for _ in range(3):
            body = {"prompt": "hello", "max_tokens": 2}
            answer = await client.post("/v1/completions", json=body, headers=headers)
            assert answer.status_code == 200
        for _, writer in silent:
            writer.close()
        process.terminate()
        log = (await process.stderr.read()).decode()
    assert "cannot accept connections: Too many open files" in log
    assert "Traceback" not in log


def never_read(**fields: object) -> bytes:
    body = {"prompt": "hello", "max_tokens": 250, "logprobs": 5} | fields
    return post("/v1/completions", json.dumps(body).encode())


@pytest.mark.parametrize("stream", [True, False])
async def test_what_nobody_reads_ends(start_stack: StartStack, stream: bool) -> None:
    """The place of a request is free when its client has taken nothing for so long."""
    stack = await start_stack(send_timeout_s=0.5)
    stack.scheduler.script = endless if stream else long_answer
    _, writer = connection = await connect(address_of(stack), receive_bytes=4096)
    stop_reading(connection)
    writer.write(never_read(stream=stream, n=1 if stream else 8))
    await stack.scheduler.until(lambda fake: bool(fake.requests))
    await nothing_open(stack)
    assert stack.scheduler.num_cancelled == (1 if stream else 0)
    writer.close()


async def test_an_answer_that_nobody_reads_is_no_fault_of_the_server(
    start_stack: StartStack, caplog: pytest.LogCaptureFixture
) -> None:
    """What clients can cause at will is not logged as an error."""
    stack = await start_stack(request_timeout_s=2)
    stack.scheduler.script = endless
    _, writer = stream = await connect(address_of(stack), receive_bytes=4096)
    stop_reading(stream)
    writer.write(never_read(stream=True, n=16))
    await stack.scheduler.until(lambda fake: bool(fake.requests))
    await nothing_open(stack)
    assert not [record for record in caplog.records if record.name.startswith("uvicorn")]
    writer.close()


async def long_answer(request: GenerateRequest) -> AsyncIterator[GenerateChunk]:
    yield start()
    yield tokens([70] * 4000, logprobs=True, finish=LENGTH)


async def test_the_deadline_of_a_request_holds_for_what_nobody_reads(
    start_stack: StartStack,
) -> None:
    stack = await start_stack(request_timeout_s=1, send_timeout_s=60)
    stack.scheduler.script = endless
    _, writer = stream = await connect(address_of(stack), receive_bytes=4096)
    stop_reading(stream)
    began = asyncio.get_running_loop().time()
    writer.write(never_read(stream=True))
    await stack.scheduler.until(lambda fake: bool(fake.requests))
    await nothing_open(stack)
    assert asyncio.get_running_loop().time() - began < 20
    writer.close()
