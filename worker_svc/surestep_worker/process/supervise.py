"""The process of a supervisor: its settings, its server, its signals."""

from __future__ import annotations

import asyncio
import logging
import signal

import uvloop
from surestep_common import access, log, rpc
from surestep_common.config import parent_pid
from surestep_common.errors import Unavailable
from surestep_common.notify import Notifier
from surestep_common.process import die_with, dump_stacks_on_signal, raise_file_limit
from surestep_common.tasks import end
from surestep_proto import supervisor_pb2 as pb
from surestep_proto import supervisor_pb2_grpc as pb_grpc

from surestep_worker.config import WorkerSettings

from . import adoption
from .child import Started, rank_command
from .rank_process import RankProcess
from .supervisor import Supervisor

logger = logging.getLogger(__name__)

_LARGEST_MESSAGE = 4 << 20  # bytes: a part of weights, at most


async def supervise(settings: WorkerSettings, started: Started | None) -> None:
    """Keep one rank running until SIGTERM or SIGINT; the first one may be `started` already.

    Raises Unavailable when this process cannot do so any more.
    """
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    first = RankProcess(started) if started is not None else None
    supervisor = Supervisor(rank_command(), settings, first=first)
    service = pb.DESCRIPTOR.services_by_name["Supervisor"]
    server = rpc.Server([service], max_message_bytes=_LARGEST_MESSAGE)
    pb_grpc.add_SupervisorServicer_to_server(supervisor, server.grpc)
    await server.start(settings.supervisor_address)
    # From here on no other supervisor is at the address, whose rank this would be.
    if (where := adoption.place(settings.rank_address)) is not None:
        supervisor.find(await adoption.adopt(where))
    await server.set_serving(True)
    try:
        async with asyncio.TaskGroup() as tasks:
            beating = tasks.create_task(Notifier().beat())
            running = tasks.create_task(supervisor.run())
            await stop.wait()
            await end(running)
            beating.cancel()
    finally:
        await supervisor.close()
        await server.stop(grace_s=0)


def main(started: Started | None) -> int:
    """Supervise until a signal comes. Exit status: 1 after a fatal error."""
    die_with(parent_pid())
    dump_stacks_on_signal()
    raise_file_limit()
    settings = WorkerSettings.load()
    access.use(settings)
    log.configure(
        "supervisor", rank=settings.rank, level=settings.log_level, as_json=settings.log_json
    )
    status = 0
    try:
        uvloop.run(supervise(settings, started))
    except* Unavailable as fatal:
        logger.error("rank %d: %s", settings.rank, fatal.exceptions[0])
        status = 1
    return status
