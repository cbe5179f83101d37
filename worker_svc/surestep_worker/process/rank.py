"""The rank process: a standby that has imported everything, then the rank that serves plans."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import uvloop
from surestep_common import access, log, rpc
from surestep_common.errors import InvalidRequest, SurestepError, Unavailable
from surestep_common.process import (
    die_with_parent,
    dump_stacks_on_signal,
    prefer_as_victim,
)
from surestep_common.request_params import MAX_PLAN_BYTES
from surestep_common.tasks import end
from surestep_proto import worker_pb2 as pb
from surestep_proto import worker_pb2_grpc as pb_grpc

from surestep_worker.checkpoint.held_weights import DEFAULT, StaleWeights, WeightFds
from surestep_worker.config import WorkerSettings
from surestep_worker.host.host_memory import memory_errors
from surestep_worker.step.heartbeat import Heartbeat

from . import adoption, control
from .adoption import Orphan
from .child import fork_beside, is_spare
from .control import Activation, Failure, Message, MessageKind
from .service import StepRunner, StepThread, WorkerService

logger = logging.getLogger("surestep_worker.process.rank")  # which runs as __main__

_STOP_GRACE_S = 2.0  # the scheduler has drained before a rank is stopped
_LARGEST_MESSAGE = MAX_PLAN_BYTES + (1 << 20)  # bytes
_TICK_S = 0.5
_NICE = 10  # of a standby that prepares beside a rank
# Losing a standby costs time only, losing a rank no request; processes with client connections are
# irreplaceable.
_VICTIM_AS_STANDBY, _VICTIM_AS_RANK = 800, 400


class BuiltRank(Protocol):
    """A loaded model, ready to serve."""

    @property
    def runner(self) -> StepRunner: ...

    @property
    def facts(self) -> pb.WorkerInfo:
        """Facts that the Worker service reports to the scheduler."""

    @property
    def profile_result(self) -> bytes:
        """Measurements for the next rank."""

    @property
    def checkpoint(self) -> str:
        """Fingerprint of the weights."""


# Loads the model, on the step thread: settings, heartbeat, weights' descriptors, profile result.
Build = Callable[[WorkerSettings, Heartbeat, WeightFds, bytes], BuiltRank]


class StartupError(Exception):
    """An error before the rank was ready."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error

    @property
    def message(self) -> Message:
        """The message to the supervisor."""
        failure = Failure.TRANSIENT
        if isinstance(self.error, StaleWeights):
            failure = Failure.WEIGHTS
        elif isinstance(self.error, InvalidRequest):
            failure = Failure.PERMANENT
        known = isinstance(self.error, SurestepError)
        reason = str(self.error) if known else f"{type(self.error).__name__}: {self.error}"
        return Message(MessageKind.FAILED, failure=failure, reason=reason)


@contextlib.contextmanager
def _start() -> Iterator[None]:
    """Run a part of the startup. Raises StartupError for every error in it."""
    try:
        with memory_errors():
            yield
    except Exception as error:
        raise StartupError(error) from error


class Rank:
    """A rank from activation to SIGTERM."""

    def __init__(
        self,
        settings: WorkerSettings,
        supervisor: socket.socket,
        activation: Activation,
        build: Build,
    ) -> None:
        limits = settings.heartbeat_timeout_s, settings.load_timeout_s
        self._source = activation.source
        if self._source.folder is not None:
            settings = settings.model_copy(update={"model": self._source.folder})
        self._settings = settings
        self._supervisor = supervisor
        self._weights, self._profile_result = activation.weights, activation.profile_result
        self._build = build
        self._heartbeat = Heartbeat.shared(activation.heartbeat_fd, *limits)
        self._held = activation.heartbeat_fd, *(os.dup(fd) for fd in activation.weights)
        self._orphan: Orphan | None = None  # once it is ready, where it can be adopted
        self._thread = StepThread()
        self._ended = asyncio.Event()
        self._lost = asyncio.Event()  # the supervisor
        self._alone: Unavailable | None = None  # why the group is lost

    async def serve(self) -> None:
        """Serve until SIGTERM or SIGINT.

        Raises StartupError, and Unavailable if the supervisor or another rank is gone.
        """
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._ended.set)
        loop.add_reader(self._supervisor.fileno(), self._lost.set)  # only its end is still to come
        settings, thread = self._settings, self._thread
        rank = settings.rank, settings.tensor_parallel_size
        service = WorkerService(*rank, thread, self._heartbeat)
        described = pb.DESCRIPTOR.services_by_name["Worker"]
        server = rpc.Server([described], max_message_bytes=_LARGEST_MESSAGE)
        pb_grpc.add_WorkerServicer_to_server(service, server.grpc)
        with _start():
            await server.start(settings.rank_address)
        try:
            with _start():
                built = await self._load(service)
            await server.set_serving(True)
            ready = Message(MessageKind.READY, built.profile_result, checkpoint=built.checkpoint)
            ready = ready._replace(source=self._source)
            self._orphan = self._adoptable(ready)
            control.send(self._supervisor, ready)
            logger.info("ready on %s", settings.rank_address)
            await self._tick_until_ended(service)
        finally:
            await server.stop(_STOP_GRACE_S)
            await service.close(_STOP_GRACE_S)
            thread.close()

    async def _load(self, service: WorkerService) -> BuiltRank:
        inherited = self._heartbeat, self._weights, self._profile_result
        built = await self._thread.submit(lambda: self._build(self._settings, *inherited))
        built.facts.weight_version = version = self._source.version
        if version != DEFAULT:
            built.facts.model_fingerprint += f"@{version}"
        service.ready(built.runner, built.facts)
        await self._thread.submit(service.tick)  # idle, before it says that it is ready
        return built

    async def _tick_until_ended(self, service: WorkerService) -> None:
        async with asyncio.TaskGroup() as tasks:
            ticking = tasks.create_task(self._tick(service))
            keeping = tasks.create_task(self._keep_supervisor())
            await self._ended.wait()
            await end(ticking)
            await end(keeping)
        if self._alone is not None:
            raise self._alone
        if control.is_closed(self._supervisor):
            raise Unavailable("the supervisor is gone")
        control.send(self._supervisor, Message(MessageKind.TERMINATING))

    def _adoptable(self, ready: Message) -> Orphan | None:
        """Listen for the next supervisor, where there may be one."""
        path = adoption.place(self._settings.rank_address)
        try:
            return None if path is None else Orphan(path, ready._replace(fds=self._held))
        except OSError as error:
            logger.warning("this rank ends with its supervisor: %s", error)
            return None

    async def _keep_supervisor(self) -> None:
        """Go over to the next supervisor when one has ended; end where there is none."""
        loop = asyncio.get_running_loop()
        while True:
            await self._lost.wait()
            self._lost.clear()
            loop.remove_reader(self._supervisor.fileno())
            successor = await self._orphan.adopted() if self._orphan is not None else None
            if successor is None:
                self._ended.set()
                return
            self._supervisor.close()
            self._supervisor = successor
            loop.add_reader(successor.fileno(), self._lost.set)

    async def _tick(self, service: WorkerService) -> None:
        """Show liveness on the path that plans take: through the event loop and the step thread."""
        try:
            while True:
                await self._thread.submit(service.tick)
                await asyncio.sleep(_TICK_S)
        except Unavailable as error:
            self._alone = error
            self._ended.set()


def run(
    settings: WorkerSettings, preload: Callable[[WorkerSettings], Build], *, spare: bool
) -> int:
    """Run a standby prepared by `preload`, then the rank it is activated as. Returns an exit
    status."""
    die_with_parent()
    prefer_as_victim(_VICTIM_AS_STANDBY)
    dump_stacks_on_signal(and_end=True)
    log.configure("worker", rank=settings.rank, level=settings.log_level, as_json=settings.log_json)
    supervisor = control.inherited()
    try:
        with _start():
            build = _beside(preload, settings) if spare else preload(settings)
        control.send(supervisor, Message(MessageKind.STANDBY))
        supervisor, activation = _activation(supervisor)
        prefer_as_victim(_VICTIM_AS_RANK)
        uvloop.run(Rank(settings, supervisor, activation, build).serve())
    except StartupError as failed:
        # A traceback says nothing about a model or a setting that is wrong.
        traceback = None if isinstance(failed.error, SurestepError) else failed.error
        logger.error("cannot start: %s", failed.message.reason, exc_info=traceback)
        with contextlib.suppress(OSError):
            control.send(supervisor, failed.message)
        return 1
    except Unavailable as gone:
        logger.error("%s", gone)
        with contextlib.suppress(OSError):
            control.send(supervisor, Message(MessageKind.FAILED, reason=str(gone)))
        return 1
    return 0


def _activation(supervisor: socket.socket) -> tuple[socket.socket, Activation]:
    """Wait until this standby is activated, or a copy of it, which has a socket of its own."""
    parent = os.getppid()
    while isinstance(order := control.next_order(supervisor), socket.socket):
        with order:
            try:
                is_copy = fork_beside(parent)
            except OSError as error:
                logger.warning("this standby cannot be copied: %s", error)
                continue  # the supervisor learns it from the socket's end
            if is_copy:
                os.dup2(order.fileno(), control.STDIN)
                supervisor.close()
                supervisor = control.inherited()
                control.send(supervisor, Message(MessageKind.STANDBY, pid=os.getpid()))
    return supervisor, order


def _beside(preload: Callable[[WorkerSettings], Build], settings: WorkerSettings) -> Build:
    """Prepare with low priority, which only a thread can have and its process be rid of again:
    a second of imports would halve the speed of the rank that there is."""
    with ThreadPoolExecutor(1, initializer=os.nice, initargs=(_NICE,)) as thread:
        return thread.submit(preload, settings).result()


def _preload(settings: WorkerSettings) -> Build:
    gc.disable()  # there is nothing to collect among imports
    from .preload import import_all  # torch: seconds

    build = import_all(settings)
    gc.enable()
    gc.freeze()  # what was imported stays: collections need not look at it
    return build


def main() -> int:
    """Run as `python -m surestep_worker.process.rank`, which a supervisor starts."""
    spare = is_spare(sys.argv)
    settings = WorkerSettings.load()
    access.use(settings)
    return run(settings, _preload, spare=spare)


if __name__ == "__main__":
    sys.exit(main())
