"""`python -m surestep_gateway` as a process of its own."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

Process = asyncio.subprocess.Process


@asynccontextmanager
async def gateway(
    model: Path, port: int, scheduler_port: int, *flags: str
) -> AsyncIterator[Process]:
    """A gateway process that is gone afterwards."""
    environ = os.environ | {
        "SURESTEP_MODEL": str(model),
        "SURESTEP_PORT": str(port),
        "SURESTEP_SCHEDULER_URL": f"127.0.0.1:{scheduler_port}",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "surestep_gateway", *flags),
        env=environ,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def until_ready(client: httpx.AsyncClient, process: Process) -> None:
    async with asyncio.timeout(60):
        while process.returncode is None:
            try:
                if (await client.get("/health/ready")).status_code == 200:
                    return
            except httpx.TransportError:
                pass
            await asyncio.sleep(0.02)
    pytest.fail("the gateway ended")


async def readiness(client: httpx.AsyncClient) -> int | None:
    """Its status; None when the connection was closed for being idle as the question came."""
    try:
        return (await client.get("/health/ready")).status_code
    except httpx.TransportError:
        return None
