"""Bodies of every nasty shape: the gateway's event loop goes on, and so do everybody's streams."""

from __future__ import annotations

import asyncio
import itertools
import time
from pathlib import Path

import httpx
import pytest
from nasty_bodies import Nasty, nasty_bodies
from support.fakes.scheduler import default_info, running
from support.processes.gateway import gateway, until_ready
from support.processes.ports import free_port
from support.processes.stalls import LIMIT_S, Stalls, long_stalls, read_stream, script

LARGE, MEDIUM, SMALL = 31 << 20, 1 << 20, 60 << 10
ATTEMPTS = 3  # a machine that does something else for a moment is not ours to answer for
THIRDS = 3  # of the bodies, which take turns


async def stalls_of(client: httpx.AsyncClient, nasty: Nasty, at_once: int) -> Stalls:
    """Long stalls while so many clients send such a body."""
    before = await long_stalls(client)
    async with asyncio.TaskGroup() as requests:
        for _ in range(at_once):
            requests.create_task(send(client, nasty))
    return (await long_stalls(client)).since(before)


async def send(client: httpx.AsyncClient, nasty: Nasty) -> float:
    """How long the answer took. Whatever it says, it is one."""
    began = time.monotonic()
    headers = {"content-type": "application/json"}
    response = await client.post(nasty.path, content=nasty.body, headers=headers)
    assert response.status_code in (200, 400, 413, 503), (nasty.name, response.text[:200])
    if response.status_code != 200:
        assert response.json()["error"]["message"], nasty.name
    return time.monotonic() - began


@pytest.mark.timeout(240)
@pytest.mark.parametrize(("size", "at_once"), [(SMALL, 8), (MEDIUM, 3), (LARGE, 1)])
@pytest.mark.parametrize(
    "third", [pytest.param(i, marks=pytest.mark.rotates(THIRDS, turn=i)) for i in range(THIRDS)]
)
async def test_the_loop_goes_on(model: Path, size: int, at_once: int, third: int) -> None:
    port = free_port()
    async with (
        running(script=script, info=default_info(max_model_len=100_000)) as scheduler,
        gateway(model, port, scheduler.port) as process,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60) as client,
        asyncio.TaskGroup() as group,
    ):
        assert process.stderr is not None
        log = group.create_task(process.stderr.read())
        await until_ready(client, process)
        done = asyncio.Event()
        stream = group.create_task(read_stream(client, done))
        await send(client, next(nasty_bodies(SMALL * 2)))  # a text process is there
        for nasty in itertools.islice(nasty_bodies(size), third, None, THIRDS):
            long = [await stalls_of(client, nasty, at_once)]
            while long[-1].stalls and len(long) < ATTEMPTS:
                long.append(await stalls_of(client, nasty, at_once))
            told = f"{nasty.name}: {long}, longer than {LIMIT_S} s"
            assert not long[-1].stalls or not all(each.busy for each in long), told
        done.set()
        assert (await stream).events > 10
        process.terminate()
        assert b"Traceback" not in await log
