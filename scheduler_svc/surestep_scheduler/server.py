"""One scheduler process: engine and gRPC server under one task group."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from surestep_common.request_bounds import MAX_REQUEST_BYTES
from surestep_common.rpc import Server
from surestep_common.tasks import end
from surestep_common.tracing import open_tracer
from surestep_proto import generate_pb2
from surestep_proto.generate_pb2_grpc import add_SchedulerServicer_to_server

from .config import SchedulerSettings
from .engine import Engine
from .service import SchedulerService

_FOR_CLIENTS = ("Generate", "Info")  # methods; the others are for operators and the gateway
_LAST_WORDS_S = 1.0  # for statuses that are on their way

logger = logging.getLogger(__name__)


@asynccontextmanager
async def running(settings: SchedulerSettings) -> AsyncIterator[str]:
    """Serve inside the block; gives the bound address. Leaving the block drains and stops."""
    descriptor = generate_pb2.DESCRIPTOR.services_by_name["Scheduler"]
    guests = {f"/{descriptor.full_name}/{name}": settings.grpc_api_key for name in _FOR_CLIENTS}
    server = Server([descriptor], guests, max_message_bytes=MAX_REQUEST_BYTES)
    engine = Engine(settings, lambda state: server.set_serving(state == generate_pb2.SERVING))
    tracer = open_tracer(settings, "surestep-scheduler")
    host, _, _ = settings.scheduler_listen.rpartition(":")
    async with asyncio.TaskGroup() as tasks:
        service = SchedulerService(engine, settings.scheduler_listen, tracer)
        add_SchedulerServicer_to_server(  # generated
            service, server.grpc
        )
        port = await server.start(settings.scheduler_listen)
        service.address = f"{host}:{port}"
        logger.info("scheduler listens on %s", service.address)
        loop = tasks.create_task(engine.run(), name="engine")
        try:
            yield service.address
        finally:
            await engine.drain()
            # The port stays open meanwhile: whoever asks is told that this scheduler drains.
            await service.wait_until_quiet(0 if loop.done() else settings.drain_timeout_s)
            engine.hand_back()
            await server.stop(_LAST_WORDS_S)
            await end(loop)
            await tracer.close()


async def serve(settings: SchedulerSettings) -> None:
    """Serve until SIGTERM or SIGINT, then drain."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    async with running(settings):
        await stop.wait()
        logger.info("draining")
