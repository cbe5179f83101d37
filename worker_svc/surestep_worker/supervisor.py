"""The parent of one rank: spawns it, sees it die, dumps its stacks, kills it, spawns the next.

Holds no tensors and imports no torch, so that nothing the rank does can stop it from answering.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections.abc import Sequence
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from surestep_common import rpc
from surestep_proto import engine_pb2 as pb
from surestep_proto import engine_pb2_grpc as pb_grpc

logger = logging.getLogger(__name__)

_STACK_DUMP_S = 0.5  # time a rank gets to write its stacks before it is killed
_TERM_GRACE_S = 5.0
_BACKOFF_S = (0.0, 0.5, 1.0, 2.0, 5.0)  # by consecutive failures to become ready
_PROBE_INTERVAL_S = 0.2
STACK_DUMP_SIGNAL = signal.SIGUSR1  # ranks register faulthandler on it


class Supervisor(pb_grpc.SupervisorServicer):
    """Keeps one child process alive. `run` owns the child; the RPCs only look and ask."""

    def __init__(self, command: Sequence[str], rank: int, rank_address: str, address: str) -> None:
        """`command` starts the rank, whose service is at `rank_address`; ours is at `address`."""
        self._command = command
        self._address = address
        self._rank = rank
        self._rank_address = rank_address
        self._process: asyncio.subprocess.Process | None = None
        self._restarts = 0
        self._last_exit = ""
        self._ready = False
        self._failures = 0  # consecutive exits before ready

    async def run(self) -> None:
        """Spawn the rank again whenever it ends. Cancel to stop; the rank is then terminated."""
        try:
            while True:
                process = await asyncio.create_subprocess_exec(*self._command)
                self._process = process
                logger.info("rank %d started, pid %d", self._rank, process.pid)
                async with asyncio.TaskGroup() as tasks:
                    probe = tasks.create_task(self._probe())
                    code = await process.wait()
                    probe.cancel()
                self._note_exit(process.pid, code)
                await asyncio.sleep(_BACKOFF_S[min(self._failures, len(_BACKOFF_S) - 1)])
        finally:
            await self._terminate()

    async def _probe(self) -> None:
        """Watch the rank's own health until it serves."""
        async with rpc.connect(self._rank_address) as channel:
            health = health_pb2_grpc.HealthStub(channel)
            while True:
                with contextlib.suppress(grpc.aio.AioRpcError):
                    reply = await health.Check(health_pb2.HealthCheckRequest(), timeout=1)
                    if reply.status == health_pb2.HealthCheckResponse.SERVING:
                        self._ready, self._failures = True, 0
                        return
                await asyncio.sleep(_PROBE_INTERVAL_S)

    def _note_exit(self, pid: int, code: int) -> None:
        self._last_exit = f"pid {pid}: " + (
            f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        )
        self._failures += 0 if self._ready else 1
        self._ready = False
        self._process = None
        self._restarts += 1
        logger.error("rank %d ended: %s", self._rank, self._last_exit)

    async def _terminate(self) -> None:
        process = self._process
        if process is None or process.returncode is not None:
            return
        process.terminate()
        try:
            await asyncio.wait_for(process.wait(), _TERM_GRACE_S)
        except TimeoutError:
            process.kill()
            await process.wait()

    async def Status(
        self, request: pb.SupervisorStatusRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.SupervisorStatus:
        """What the supervisor knows of its rank."""
        state = pb.DEAD
        if self._process is not None:
            state = pb.READY if self._ready else pb.STARTING
        return pb.SupervisorStatus(
            pid=os.getpid(),
            address=self._address,
            rank=self._rank,
            rank_state=state,
            rank_pid=self._process.pid if self._process is not None else 0,
            rank_address=self._rank_address,
            restarts=self._restarts,
            last_exit=self._last_exit,
        )

    async def Restart(
        self, request: pb.RestartRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.RestartResponse:
        """Dump stacks, kill. The `run` loop respawns."""
        process = self._process
        if process is None or request.expected_pid not in (0, process.pid):
            return pb.RestartResponse(restarted=False)
        logger.warning("restarting rank %d, pid %d: %s", self._rank, process.pid, request.reason)
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(STACK_DUMP_SIGNAL)
            await asyncio.sleep(_STACK_DUMP_S)
            process.kill()
        await process.wait()
        return pb.RestartResponse(restarted=True)


def rank_command() -> list[str]:
    """Command line of the rank process; its settings travel in the environment."""
    return [sys.executable, "-m", "surestep_worker.rank"]
