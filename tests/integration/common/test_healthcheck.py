"""The health of a gRPC service, as probes ask for it."""

from __future__ import annotations

import asyncio

from surestep_common import healthcheck
from surestep_common.rpc import LIVE, Server
from surestep_proto import supervisor_pb2 as pb

SUPERVISOR = pb.DESCRIPTOR.services_by_name["Supervisor"]


async def test_a_server_that_does_not_serve_lives() -> None:
    server = Server([SUPERVISOR])
    address = f"127.0.0.1:{await server.start('127.0.0.1:0')}"

    async def trouble(name: str = "") -> str | None:
        return await asyncio.to_thread(healthcheck.trouble, address, name)

    try:
        assert await trouble() == "NOT_SERVING"
        assert await trouble(LIVE) is None
        await server.set_serving(True)
        assert await trouble() is None
        assert await trouble(SUPERVISOR.full_name) is None
        assert await trouble("nobody") == "NOT_FOUND"
        await server.set_serving(False)
        assert await trouble() == "NOT_SERVING"
        assert await trouble(LIVE) is None
    finally:
        await server.stop(0)
    assert await trouble(LIVE) == "UNAVAILABLE"
