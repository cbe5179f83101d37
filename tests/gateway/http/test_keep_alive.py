"""Connections between two requests."""

from __future__ import annotations

import asyncio

import pytest
from slow_clients import connect, everything
from support.processes.gateway_stack import StartStack
from surestep_gateway.settings.config import GatewaySettings

HEALTH = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"


def test_idle_connections_outlive_those_of_load_balancers() -> None:
    """A balancer that keeps a connection for 60 s never sends a request into a closed one."""
    assert GatewaySettings.model_fields["timeout_keep_alive"].default > 60


async def test_a_kept_connection_is_used_again_and_then_closed(
    start_stack: StartStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be idle for longer than the head of a request may take."""
    monkeypatch.setattr("surestep_gateway.server.HEAD_TIMEOUT_S", 0.5)
    stack = await start_stack(timeout_keep_alive=3)
    host, _, port = stack.server.address.rpartition(":")
    reader, writer = await connect((host, int(port)))
    clock = asyncio.get_running_loop().time
    writer.write(HEALTH)
    await reader.readuntil(b"\r\n\r\n")
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(1.7):  # three sweeps, which would close an overdue one
            await reader.read()
    writer.write(HEALTH)
    assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
    answered = clock()
    async with asyncio.timeout(10):
        assert await everything(reader) == b""
    assert clock() - answered > 2
    writer.close()
