"""The text processes of a gateway: started on demand, killed when a request is too heavy."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import resource
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from surestep_common.config import child_environ
from surestep_common.errors import (
    InternalError,
    InvalidRequest,
    RequestTooLarge,
    SurestepError,
    Unavailable,
    lack_of,
)
from surestep_common.process import python_module

from surestep_gateway.observability.metrics import GatewayMetrics

from . import wire
from .body_bounds import TOO_MUCH_MEMORY
from .process_limits import TOO_MUCH_COMPUTING
from .wire import Parts
from .work_gate import WorkGate

if TYPE_CHECKING:
    from .service import TextProcessor

logger = logging.getLogger(__name__)

LARGE_BYTES = 4 << 20  # of a body; so large ones leave a process to the others
_WARM_S = 4.0  # after the start of the gateway: the worker beside it loads its model first
_START_S = 60.0
_IDLE_S = 60.0  # until all but a few end
_KEPT = 2  # of them: one for the next request while another is replaced
_LOOK_S = 0.05  # between two looks at their memory
_NICE = 5  # of theirs: token streams have priority
REQUEST_TIMEOUT_S = 30.0  # of a text process over a request
_ATTEMPTS = 2  # for a request whose process dies without a reason that is known

_Reply = asyncio.Future["list[bytes] | SurestepError"]

_OWN_FAULTS = {signal.SIGABRT, signal.SIGBUS, signal.SIGSEGV}  # of code that is out of memory


class ProcessDied(Exception):
    """A text process ended before it replied; `signal` ended it, if one did."""

    def __init__(self, returncode: int) -> None:
        super().__init__(f"exit status {returncode}")
        self.signal = -returncode if returncode < 0 else None


class TextProcess:
    """Process that works on a request at a time, for one model."""

    def __init__(self, process: asyncio.subprocess.Process, processor: TextProcessor) -> None:
        self._process = process
        self.processor = processor
        self._at_first = 0  # bytes of memory when it has loaded everything
        self.starved = False  # it was ended because it had taken too much since
        self.checking = ""  # the field of the request whose grammar it checks now

    @classmethod
    async def start(cls, processor: TextProcessor) -> TextProcess:
        """Start a process and wait until it is ready. Raise ProcessDied, OSError."""
        environ = {
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),  # the same code as here
            "TOKENIZERS_PARALLELISM": "false",
            "RUST_BACKTRACE": "0",  # takes memory when there is none
        }
        process = await asyncio.create_subprocess_exec(
            *python_module("surestep_gateway.text_process"),
            env=child_environ(environ),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        with contextlib.suppress(ProcessLookupError):
            os.setpriority(os.PRIO_PROCESS, process.pid, _NICE)  # half a second of imports, too
        started = cls(process, processor)
        try:
            await started.ask(processor.dump())
        except BaseException:
            await started.end()
            raise
        started._at_first = resident_bytes(process.pid)
        return started

    @property
    def alive(self) -> bool:
        return self._process.returncode is None

    async def ask(self, parts: Parts) -> list[bytes]:
        """Send a job and return the reply. A caller that stops waiting must `end` the process.

        Raise ProcessDied.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            await wire.send(self._process.stdin, parts)
            while (answer := await wire.receive(self._process.stdout))[0] == wire.CHECKING:
                self.checking = answer[1].decode()
            return answer
        except (ConnectionError, asyncio.IncompleteReadError):
            raise ProcessDied(await self._process.wait()) from None

    def look(self, most_bytes: int) -> None:
        """Kill the process if a request has taken more memory than allowed."""
        if self.alive and resident_bytes(self._process.pid) - self._at_first > most_bytes:
            self.starved = True
            self._process.kill()

    async def end(self) -> None:
        if self.alive:
            self._process.kill()
        await self._process.wait()
        if self._process.stdin is not None:
            self._process.stdin.close()


def resident_bytes(pid: int) -> int:
    """Return the memory of a process; 0 when it is gone."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize()
    except (OSError, IndexError):
        return 0


class TextPool:
    """At most as many processes as the settings allow, for all models. `run` must be running."""

    def __init__(self, processors: Sequence[TextProcessor], metrics: GatewayMetrics) -> None:
        self._processors = processors
        self._settings = settings = processors[0].settings
        self._metrics = metrics
        self._gate = WorkGate(settings.text_processes, large=LARGE_BYTES)
        self._idle: list[TextProcess] = []
        self._busy: set[TextProcess] = set()
        self._working = asyncio.Event()  # one is busy
        self._tasks = asyncio.TaskGroup()

    async def run(self) -> None:
        """Run until cancelled; every process is gone then."""
        try:
            async with self._tasks:
                self._tasks.create_task(self._watch())
                await asyncio.sleep(_WARM_S)
                await self._warm()
                while True:
                    await asyncio.sleep(_IDLE_S)
                    while len(self._idle) > _KEPT:
                        await self._idle.pop(0).end()
        finally:
            for process in self._idle:
                await process.end()

    async def _watch(self) -> None:
        """Enforce the memory limit; the system's limit comes second, as not all code survives
        it.
        """
        while True:
            await self._working.wait()
            await asyncio.sleep(_LOOK_S)
            for process in self._busy:
                process.look(self._settings.text_memory_bytes)

    async def _warm(self) -> None:
        """Start processes before they are needed."""
        for count in range(1, _KEPT + 1):
            async with self._gate.place(0):
                if len(self._idle) < min(count, self._settings.text_processes):
                    await self._spare(self._processors[count % len(self._processors)])

    async def _spare(self, processor: TextProcessor) -> None:
        with contextlib.suppress(SurestepError):
            self._idle.append(await self._start(processor))

    async def ask(
        self, processor: TextProcessor, job: bytes, info: bytes, raw: bytearray, caller: str
    ) -> list[bytes]:
        """Return the parts of the reply to a job for a model. Raise SurestepError.

        A running job continues when its client disconnects, as the process must not be left in the
        middle of one.
        """
        await self._gate.enter(len(raw), caller)
        reply: _Reply = asyncio.get_running_loop().create_future()
        self._tasks.create_task(self._work(processor, [job, info, raw], caller, reply))
        answer = await reply
        if isinstance(answer, SurestepError):
            raise answer
        status, *parts = answer
        if status == b"error":
            raise wire.load_error(parts[0])
        return parts

    async def _work(
        self, processor: TextProcessor, parts: Parts, caller: str, reply: _Reply
    ) -> None:
        """Do a job. Hold its place until a process that it has ended is replaced: the caller who
        ends processes waits for new ones, and no other caller does.
        """
        answer: list[bytes] | SurestepError = InternalError("a request could not be prepared")
        try:
            answer = await self._answer(processor, parts)
        except SurestepError as error:
            answer = error
        except Exception as error:
            if lack := lack_of(error):
                answer = lack
                logger.warning("no text process can be started: %s", error)
            else:
                logger.exception("a request could not be prepared")
        finally:
            if not reply.done():  # its client is still there
                reply.set_result(answer)
            try:
                if isinstance(answer, InvalidRequest | RequestTooLarge):  # it has ended a process
                    await self._spare(processor)
            finally:
                self._gate.leave(len(parts[2]), caller)

    async def _answer(self, processor: TextProcessor, parts: Parts) -> list[bytes]:
        for _ in range(_ATTEMPTS):
            process = await self._take(processor)
            try:
                self._busy.add(process)
                self._working.set()
                async with asyncio.timeout(REQUEST_TIMEOUT_S):
                    answer = await process.ask(parts)
                self._idle.append(process)
                return answer
            except TimeoutError:
                self._count("timeout")
                raise RequestTooLarge(
                    f"the request takes longer than {REQUEST_TIMEOUT_S:g} s to prepare"
                ) from None
            except ProcessDied as death:
                self._blame_request(process, death)
                self._count("death")
                logger.warning("a text process died: %s", death)
            finally:
                self._busy.discard(process)
                if not self._busy:
                    self._working.clear()
                if process not in self._idle:
                    await process.end()
        raise Unavailable("the request could not be prepared")

    def _blame_request(self, process: TextProcess, death: ProcessDied) -> None:
        """Raise the error for a request that ended its process, if one did."""
        greedy = process.starved or death.signal in _OWN_FAULTS
        if field := process.checking:
            if greedy or death.signal == TOO_MUCH_COMPUTING:
                self._count("grammar")
                raise InvalidRequest(
                    f"{field}: it takes too much time or memory to check; ask for less", param=field
                ) from None
        elif greedy:
            self._count("memory")
            raise RequestTooLarge(TOO_MUCH_MEMORY) from None

    async def _take(self, processor: TextProcessor) -> TextProcess:
        """Return a process of the model; a new one takes the place of one that is idle."""
        for process in [one for one in reversed(self._idle) if one.processor is processor]:
            self._idle.remove(process)
            process.checking = ""
            if process.alive:
                return process
            await process.end()
        if len(self._idle) + len(self._busy) >= self._settings.text_processes and self._idle:
            await self._idle.pop(0).end()
        return await self._start(processor)

    async def _start(self, processor: TextProcessor) -> TextProcess:
        try:
            async with asyncio.timeout(_START_S):
                try:
                    return await TextProcess.start(processor)
                except ProcessDied as death:
                    logger.warning("a text process died at its start: %s", death)
                    return await TextProcess.start(processor)
        except (TimeoutError, ProcessDied, OSError) as error:
            logger.error("cannot start a text process: %s", error)
            raise Unavailable("the request could not be prepared") from error

    def _count(self, cause: str) -> None:
        self._metrics.text_process_ends.labels(cause).inc()
