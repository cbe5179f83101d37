"""The rank process: binds first, loads in the step thread, serves plans until told to stop."""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import signal

import uvloop
from surestep_common import log, rpc, tls
from surestep_common.process import die_with_parent
from surestep_proto import engine_pb2 as pb
from surestep_proto import engine_pb2_grpc as pb_grpc

from .config import WorkerSettings
from .service import StepThread, WorkerService
from .supervisor import STACK_DUMP_SIGNAL

logger = logging.getLogger(__name__)

_STOP_GRACE_S = 2.0  # the scheduler has drained before a rank is told to stop


async def serve(settings: WorkerSettings) -> None:
    """Run the rank until SIGTERM or SIGINT. Raises whatever loading the model raised."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    thread = StepThread()
    service = WorkerService(settings.rank, settings.tensor_parallel_size, thread)
    server = rpc.Server([pb.DESCRIPTOR.services_by_name["Worker"]])
    pb_grpc.add_WorkerServicer_to_server(service, server.grpc)
    await server.start(settings.rank_address)
    try:
        service.ready(*await thread.submit(lambda: _build(settings)))
        await server.set_serving(True)
        logger.info("ready on %s", settings.rank_address)
        await stop.wait()
    finally:
        await server.stop(_STOP_GRACE_S)
        thread.close()


def _build(settings: WorkerSettings):  # type: ignore[no-untyped-def]
    from .build import build_runner  # torch and transformers: seconds, on the step thread

    return build_runner(settings)


def main() -> None:
    """Entry point of `python -m surestep_worker.rank`."""
    die_with_parent()
    faulthandler.enable()
    faulthandler.register(STACK_DUMP_SIGNAL, all_threads=True)
    settings = WorkerSettings.load()
    tls.use(settings)
    log.configure("worker", rank=settings.rank, level=settings.log_level, as_json=settings.log_json)
    uvloop.run(serve(settings))


if __name__ == "__main__":
    main()
