"""POST /admin/workers/restart: only with its own key, one scheduler after the other."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
import pytest
from pydantic import SecretStr
from rich.console import Console
from support.fakes.scheduler import running
from support.processes.gateway import gateway, until_ready
from support.processes.gateway_stack import Stack, StartStack
from support.processes.ports import free_port
from surestep_cli.commands import RestartWorkers
from surestep_common.errors import Unavailable

PATH = "/admin/workers/restart"
KEY = {"authorization": "Bearer admin"}


async def test_without_a_key_there_is_no_such_endpoint(stack: Stack) -> None:
    assert (await stack.client.post(PATH, headers=KEY)).status_code == 404


@pytest.mark.parametrize("header", [None, "Bearer wrong", "Basic admin", "admin", "Bearer user"])
async def test_the_key_is_its_own(start_stack: StartStack, header: str | None) -> None:
    stack = await start_stack(admin_api_key="admin", api_key="user")
    headers = {} if header is None else {"authorization": header}
    response = await stack.client.post(PATH, headers=headers)
    assert response.status_code == 401
    assert response.json()["error"]["type"] == "authentication_error"
    assert stack.scheduler.restarts == []


async def test_one_scheduler_after_the_other(start_stack: StartStack) -> None:
    stack = await start_stack(replicas=2, admin_api_key="admin")
    first, second = stack.schedulers
    first.restarting = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        task = group.create_task(
            stack.client.post(PATH, headers=KEY, json={"reason": "new kernels"})
        )
        await stack.until_serving(1)
        assert first.restarts == ["new kernels"]
        assert second.restarts == []
        assert (await stack.complete(max_tokens=1)).status_code == 200
        first.restarting.set()
    assert second.restarts == ["new kernels"]
    done = task.result().json()["restarted"]
    assert [one["scheduler"] for one in done] == [f"127.0.0.1:{s.port}" for s in stack.schedulers]
    assert [(one["epoch"], one["num_ranks"]) for one in done] == [(3, 2)] * 2


async def test_one_of_them_alone(start_stack: StartStack) -> None:
    stack = await start_stack(replicas=2, admin_api_key="admin")
    address = f"127.0.0.1:{stack.schedulers[1].port}"
    response = await stack.client.post(PATH, headers=KEY, params={"scheduler": address})
    assert response.status_code == 200
    assert [len(s.restarts) for s in stack.schedulers] == [0, 1]
    response = await stack.client.post(PATH, headers=KEY, params={"scheduler": "x:1"})
    assert (response.status_code, response.json()["error"]["param"]) == (404, "scheduler")
    response = await stack.client.post(PATH, headers=KEY, json={"reason": 3})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "reason")


async def test_a_failure_ends_the_round(start_stack: StartStack) -> None:
    stack = await start_stack(replicas=2, admin_api_key="admin")
    await stack.schedulers[0].stop()
    response = await stack.client.post(PATH, headers=KEY)
    assert response.status_code == 503
    assert response.json()["failed"] == f"127.0.0.1:{stack.schedulers[0].port}"
    assert stack.schedulers[1].restarts == []


async def test_the_command(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    async with (
        running() as scheduler,
        gateway(model, port, scheduler.port, "--admin-api-key", "admin") as process,
        httpx.AsyncClient(base_url=url, timeout=20) as client,
    ):
        await until_ready(client, process)
        asked = RestartWorkers(url=url, admin_api_key=SecretStr("admin"), reason="why not")
        assert await asyncio.to_thread(asked.run, Console()) == 0
        assert scheduler.restarts == ["why not"]
        assert "2 workers replaced, serving again after" in capsys.readouterr().out
        asked = RestartWorkers(url=url, admin_api_key=SecretStr("wrong"))
        with pytest.raises(Unavailable, match="missing or wrong admin key"):
            await asyncio.to_thread(asked.run, Console())
