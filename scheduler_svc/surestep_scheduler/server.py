"""Scheduler process: engine and gRPC server under one task group."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from surestep_common import addresses
from surestep_common.access import is_local
from surestep_common.request_params import MAX_REQUEST_BYTES
from surestep_common.rpc import Server
from surestep_common.tasks import end
from surestep_common.tracing import open_tracer
from surestep_proto import scheduler_pb2, vllm_engine_pb2
from surestep_proto.scheduler_pb2_grpc import add_SchedulerServicer_to_server
from surestep_proto.vllm_engine_pb2_grpc import add_VllmEngineServicer_to_server

from surestep_scheduler.service.requests import CacheOwners

from .config import SchedulerSettings
from .engine.engine import Engine
from .service.kv_events import KVEvents
from .service.service import SchedulerService
from .vllm.service import VllmService

_OURS = scheduler_pb2.DESCRIPTOR.services_by_name["Scheduler"]
_VLLMS = vllm_engine_pb2.DESCRIPTOR.services_by_name["VllmEngine"]
# Methods for clients; the others are for operators and the gateway.
_FOR_CLIENTS = [f"/{_OURS.full_name}/{name}" for name in ("Generate", "Info")]
_FOR_ROUTERS = [f"/{_VLLMS.full_name}/{method.name}" for method in _VLLMS.methods]
_MOST_SLOTS = 1024  # of workers that have not told yet how many they have
_MOST_OTHERS = 256  # calls that generate nothing, and those that are about to be refused
_LAST_WORDS_S = 1.0  # for statuses that are on their way

logger = logging.getLogger(__name__)


@asynccontextmanager
async def running(settings: SchedulerSettings) -> AsyncIterator[str]:
    """Serve inside the block; gives the bound address. Leaving the block drains and stops."""
    server = _server(settings)
    events = KVEvents(settings.kv_events) if settings.kv_events is not None else None
    engine = Engine(
        settings,
        lambda state: server.set_serving(state == scheduler_pb2.SERVING),
        log=events.log if events is not None else None,
    )
    tracer = open_tracer(settings, "surestep-scheduler")
    async with asyncio.TaskGroup() as tasks:
        keys = _keys(settings)
        owners = CacheOwners(keys, shared=settings.share_prefix_cache_between_keys)
        service = SchedulerService(engine, settings.scheduler_listen, tracer, owners, tasks)
        add_SchedulerServicer_to_server(  # generated
            service, server.grpc
        )
        add_VllmEngineServicer_to_server(  # generated
            VllmService(engine, service, tasks, next(iter(settings.served_model_name), "")),
            server.grpc,
        )
        port = await server.start(settings.scheduler_listen)
        service.address = addresses.bound(settings.scheduler_listen, port)
        logger.info("scheduler listens on %s", service.address)
        loop = tasks.create_task(engine.run(), name="engine")
        try:
            yield service.address
        finally:
            await engine.drain()
            # The port stays open meanwhile, to answer that this scheduler drains.
            await service.wait_until_quiet(0 if loop.done() else settings.drain_timeout_s)
            engine.hand_back()
            service.stop()
            await server.stop(_LAST_WORDS_S)
            await end(loop)
            await tracer.close()
            if events is not None:
                await asyncio.to_thread(events.close)


def _server(settings: SchedulerSettings) -> Server:
    """Make the server, with the services open that the settings open."""
    if settings.vllm_grpc_public and not is_local(settings.scheduler_listen):
        logger.warning(
            "vllm.grpc.engine on %s takes requests from anyone who reaches it",
            settings.scheduler_listen,
        )
    return Server(
        [_OURS, _VLLMS],
        dict.fromkeys((*_FOR_CLIENTS, *_FOR_ROUTERS), _keys(settings)),
        public=_FOR_ROUTERS if settings.vllm_grpc_public else (),
        max_message_bytes=MAX_REQUEST_BYTES,
        max_streams=_max_streams(settings),
    )


def _max_streams(settings: SchedulerSettings) -> int:
    """Return how many calls a single gateway may have open: all that run and all that wait."""
    running = settings.max_num_seqs or _MOST_SLOTS
    return running + 2 * settings.max_queue_len + _MOST_OTHERS  # twice: see tenants.may_enter


def _keys(settings: SchedulerSettings) -> list[str]:
    """Return the keys of gRPC clients."""
    return [key.get_secret_value() for key in settings.grpc_api_key]


async def serve(settings: SchedulerSettings) -> None:
    """Serve until SIGTERM or SIGINT, then drain."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    async with running(settings):
        await stop.wait()
        logger.info("draining")
