"""`python -m surestep_gateway`: starts fast and light, drains on SIGTERM, fails with a status."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from support.fakes.scheduler import running, start, tokens
from support.processes.gateway import Process, gateway, readiness, until_ready
from support.processes.ports import free_port
from surestep_proto.scheduler_pb2 import LENGTH, GenerateChunk, GenerateRequest


async def test_sigterm_lets_open_requests_finish(model: Path) -> None:
    go = asyncio.Event()

    async def script(request: GenerateRequest) -> AsyncIterator[GenerateChunk]:
        yield start()
        yield tokens([70])
        async with asyncio.timeout(30):
            await go.wait()
        yield tokens([71], finish=LENGTH)

    port = free_port()
    async with (
        running(script=script) as scheduler,
        gateway(model, port, scheduler.port) as process,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=20) as client,
    ):
        await until_ready(client, process)
        async with asyncio.TaskGroup() as group:
            task = group.create_task(client.post("/v1/completions", json={"prompt": "x"}))
            await scheduler.until(lambda fake: fake.num_open == 1)
            process.send_signal(signal.SIGTERM)
            async with asyncio.timeout(10):
                while await readiness(client) != 503:
                    await asyncio.sleep(0.01)
            go.set()
        assert task.result().json()["usage"]["completion_tokens"] == 2
        async with asyncio.timeout(20):
            assert await process.wait() == 0


async def test_a_second_signal_does_not_wait(model: Path) -> None:
    async def script(request: GenerateRequest) -> AsyncIterator[GenerateChunk]:
        yield start()
        await asyncio.sleep(60)

    port = free_port()
    async with (
        running(script=script) as scheduler,
        gateway(model, port, scheduler.port) as process,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=20) as client,
    ):
        await until_ready(client, process)
        request = asyncio.ensure_future(client.post("/v1/completions", json={"prompt": "x"}))
        await scheduler.until(lambda fake: fake.num_open == 1)
        for _ in range(2):
            process.send_signal(signal.SIGINT)
            await asyncio.sleep(0.05)  # two signals at once are one signal
        async with asyncio.timeout(20):
            assert await process.wait() == 0
        request.cancel()
        await asyncio.wait([request], timeout=10)


@pytest.mark.parametrize("fault", ["port", "model"])
async def test_fatal_errors_have_a_status_and_one_line(
    model: Path, tmp_path: Path, fault: str
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1] if fault == "port" else free_port()
        folder = tmp_path if fault == "model" else model
        async with gateway(folder, port, 1) as process, asyncio.timeout(30):
            _, stderr = await process.communicate()
    assert process.returncode == 1
    text = stderr.decode()
    assert "Traceback" not in text
    assert ("cannot listen on" if fault == "port" else "tokenizer.json not found") in text


async def _told(process: Process, what: str) -> str:
    """The line of its log that says so."""
    assert process.stderr is not None
    async with asyncio.timeout(60):
        async for line in process.stderr:
            if what in line.decode():
                return line.decode()
    pytest.fail(f"the gateway ended without a word of {what!r}")


async def test_a_model_that_is_not_there_yet_is_waited_for(model: Path, tmp_path: Path) -> None:
    """Whoever fetches it leaves a link when it is complete."""
    folder, elsewhere = tmp_path / "served", tmp_path / "model"
    port = free_port()
    async with (
        running() as scheduler,
        gateway(folder, port, scheduler.port) as process,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=20) as client,
    ):
        assert str(folder) in await _told(process, "which is not there yet")
        folder.symlink_to(elsewhere)
        elsewhere.symlink_to(model)
        await until_ready(client, process)
        process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(20):
            assert await process.wait() == 0


async def test_a_gateway_that_waits_for_its_model_can_be_stopped(tmp_path: Path) -> None:
    async with gateway(tmp_path / "served", free_port(), 1) as process:
        await _told(process, "which is not there yet")
        process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(20):
            assert await process.wait() == 0


@pytest.mark.parametrize(
    ("module", "heavy"),
    [
        ("server", {"torch", "transformers"}),  # arithmetic of vectors is numpy's
        (
            "text_process",
            {"torch", "transformers", "numpy"},
        ),  # of which there may be many
    ],
)
async def test_heavy_packages_stay_out(module: str, heavy: set[str]) -> None:
    code = (
        f"import sys, surestep_gateway.{module}\n"
        f"sys.exit(', '.join({heavy!r} & sys.modules.keys()) or 0)"
    )
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", code, env=environ)
    async with asyncio.timeout(30):
        assert await process.wait() == 0
