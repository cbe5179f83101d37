"""The rank process: a standby that has imported everything, then the rank that serves plans."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
from collections.abc import Callable
from typing import Protocol

import uvloop
from surestep_common import log, rpc, tls
from surestep_common.errors import Unavailable
from surestep_common.process import die_with_parent, dump_stacks_on_signal
from surestep_common.tasks import end
from surestep_proto import engine_pb2 as pb
from surestep_proto import engine_pb2_grpc as pb_grpc

from . import control
from .config import WorkerSettings
from .control import Activation, Kind, Message
from .heartbeat import Heartbeat
from .service import StepRunner, StepThread, WorkerService

logger = logging.getLogger("surestep_worker.rank")  # which runs as __main__

_STOP_GRACE_S = 2.0  # the scheduler has drained before a rank is told to stop
_TICK_S = 0.5


class Loaded(Protocol):
    """What a rank serves."""

    @property
    def runner(self) -> StepRunner:
        """Executes plans."""

    @property
    def facts(self) -> pb.WorkerInfo:
        """For the scheduler."""

    @property
    def memo(self) -> bytes:
        """For the next rank."""


# Loads the model, on the step thread: settings, heartbeat, weights descriptor, memo.
Build = Callable[[WorkerSettings, Heartbeat, int, bytes], Loaded]


class Rank:
    """From activation to SIGTERM."""

    def __init__(
        self,
        settings: WorkerSettings,
        supervisor: socket.socket,
        activation: Activation,
        build: Build,
    ) -> None:
        limits = settings.heartbeat_timeout_s, settings.load_timeout_s
        self._settings = settings
        self._supervisor = supervisor
        self._weights_fd, self._memo = activation.weights_fd, activation.memo
        self._build = build
        self._heartbeat = Heartbeat.shared(activation.heartbeat_fd, *limits)
        os.close(activation.heartbeat_fd)
        self._thread = StepThread()
        self._ended = asyncio.Event()

    async def serve(self) -> None:
        """Run until SIGTERM or SIGINT.

        Raises whatever loading the model raised, and Unavailable when the supervisor is gone.
        """
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._ended.set)
        loop.add_reader(self._supervisor.fileno(), self._ended.set)  # nothing more but its end
        settings, thread = self._settings, self._thread
        rank = settings.rank, settings.tensor_parallel_size
        service = WorkerService(*rank, thread, self._heartbeat)
        server = rpc.Server([pb.DESCRIPTOR.services_by_name["Worker"]])
        pb_grpc.add_WorkerServicer_to_server(service, server.grpc)
        await server.start(settings.rank_address)
        try:
            memo = await self._load(service)
            await server.set_serving(True)
            control.send(self._supervisor, Message(Kind.READY, memo))
            logger.info("ready on %s", settings.rank_address)
            await self._tick_until_ended(service)
        finally:
            await server.stop(_STOP_GRACE_S)
            thread.close()

    async def _load(self, service: WorkerService) -> bytes:
        inherited = self._heartbeat, self._weights_fd, self._memo
        built = await self._thread.submit(lambda: self._build(self._settings, *inherited))
        service.ready(built.runner, built.facts)
        return built.memo

    async def _tick_until_ended(self, service: WorkerService) -> None:
        async with asyncio.TaskGroup() as tasks:
            ticking = tasks.create_task(self._tick(service))
            await self._ended.wait()
            await end(ticking)
        if control.is_closed(self._supervisor):
            raise Unavailable("the supervisor is gone")
        control.send(self._supervisor, Message(Kind.LEAVING))

    async def _tick(self, service: WorkerService) -> None:
        """A sign of life on the way that plans take: through the loop and the step thread."""
        while True:
            await self._thread.submit(service.tick)
            await asyncio.sleep(_TICK_S)


def run(settings: WorkerSettings, preload: Callable[[WorkerSettings], Build]) -> None:
    """A standby that `preload` prepares, until it is activated; then the rank."""
    die_with_parent()
    dump_stacks_on_signal(and_end=True)
    log.configure("worker", rank=settings.rank, level=settings.log_level, as_json=settings.log_json)
    supervisor = control.inherited()
    build = preload(settings)
    control.send(supervisor, Message(Kind.STANDBY))
    activation = control.wait_for_activation(supervisor)
    uvloop.run(Rank(settings, supervisor, activation, build).serve())


def _preload(settings: WorkerSettings) -> Build:
    from .preload import everything  # torch: seconds

    return everything(settings)


def main() -> None:
    """Entry point of `python -m surestep_worker.rank`, which a supervisor starts."""
    settings = WorkerSettings.load()
    tls.use(settings)
    run(settings, _preload)


if __name__ == "__main__":
    main()
