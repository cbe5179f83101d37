"""Pauses and sleep by HTTP: switched on, with the admin key, and words that are known."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from support.processes.gateway_stack import Stack, StartStack
from surestep_gateway.settings.config import GatewaySettings

KEY = {"authorization": "Bearer admin"}
ORDERS = (
    *("/sleep", "/wake_up", "/pause", "/resume", "/abort_requests"),
    *("/release_memory_occupation", "/resume_memory_occupation"),
    *("/pause_generation", "/continue_generation", "/reset_prefix_cache"),
)
QUESTIONS = ("/is_sleeping", "/is_paused", "/server_info", "/get_world_size")


async def test_they_are_switched_off(start_stack: StartStack) -> None:
    stack = await start_stack(admin_api_key="admin")
    for path in ORDERS:
        assert (await stack.client.post(path, headers=KEY)).status_code == 404
    for path in QUESTIONS:
        assert (await stack.client.get(path, headers=KEY)).status_code == 404


def test_they_need_a_key_to_ask_for(model: Path) -> None:
    with pytest.raises(ValueError, match="--enable-sleep-mode needs --admin-api-key"):
        GatewaySettings.model_validate({"model": model, "enable_sleep_mode": True})


@pytest.mark.parametrize(
    "header",
    [None, "Bearer wrong", "Bearer user", "Basic YWRtaW46dXNlcg==", "Basic !", "Basic YWRtaW4="],
)
async def test_the_admin_key_alone_opens_them(start_stack: StartStack, header: str | None) -> None:
    stack = await start_stack(admin_api_key="admin", api_key="user", enable_sleep_mode=True)
    headers = {} if header is None else {"authorization": header}
    for path in ORDERS:
        assert (await stack.client.post(path, headers=headers)).status_code == 401
    for path in QUESTIONS:
        assert (await stack.client.get(path, headers=headers)).status_code == 401


@pytest.fixture
async def open_stack(start_stack: StartStack) -> Stack:
    return await start_stack(admin_api_key="admin", enable_sleep_mode=True)


async def test_the_key_may_be_the_password_of_a_url(open_stack: Stack) -> None:
    asked = await open_stack.client.get("/is_paused", auth=("anybody", "admin"))
    assert (asked.status_code, asked.json()) == (200, {"is_paused": False})


@pytest.mark.parametrize(
    ("path", "param"),
    [
        ("/sleep?level=3", "level"),
        ("/sleep?level=-1", "level"),
        ("/sleep?level=deep", "level"),
        ("/sleep?mode=now", "mode"),
        ("/pause?mode=", "mode"),
        ("/sleep?scheduler=x:1", "scheduler"),
    ],
)
async def test_unknown_words_are_refused(open_stack: Stack, path: str, param: str) -> None:
    response = await open_stack.client.post(path, headers=KEY)
    assert response.status_code == (404 if param == "scheduler" else 400)
    assert response.json()["error"]["param"] == param


async def test_bodies_are_checked(open_stack: Stack) -> None:
    for path in ("/abort_requests", "/release_memory_occupation", "/pause_generation"):
        bad = await open_stack.client.post(
            path, headers=KEY, json={"request_ids": 3, "tags": 3, "mode": 3}
        )
        assert bad.status_code == 400

    async def pieces() -> AsyncIterator[bytes]:
        yield b'{"mode": 3}'

    as_json = {**KEY, "content-type": "application/json"}
    path = "/pause_generation"
    in_pieces = await open_stack.client.post(path, headers=as_json, content=pieces())
    assert in_pieces.status_code == 400
    plain = {**KEY, "content-type": "text/plain"}
    response = await open_stack.client.post("/abort_requests", headers=plain, content=b"{}")
    assert response.status_code == 415
