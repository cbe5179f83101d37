"""Has grammars compiled, each in a process of its own, so that none can hold up what it is not in.

A process is known by its connection: one that has taken too much processor time or memory, or was
killed, has hung up. It ends when the last reference to it is gone, which closes its connection.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from threading import Event, Lock

from surestep_common.config import child_environ
from surestep_common.errors import InvalidRequest, SurestepError, Unavailable
from surestep_common.process import python_module

from .frames import Frames, error_of
from .process import COMPILE_S, took_too_long

PROGRAM = "surestep_worker.grammar.process"
MAX_CACHED_GRAMMARS = 64  # processes that are kept though no request needs them
_MAX_REFUSED = 256  # grammars that are known to be wrong, or to take too much
_AT_ONCE = 8  # compilations; the scheduler asks for fewer
_TIMEOUT_S = 30.0  # of a compilation, from its own beginning: others may have the processors
_FORK_TIMEOUT_S = 30.0  # of reading a tokenizer, for the first one
_RETRY_AFTER_S = 2.0


class Process:
    """A grammar's process, which waits for the source or for questions."""

    def __init__(self, ours: socket.socket) -> None:
        """Wait until it has been forked. Raises OSError if there will be none."""
        with ours:
            ours.settimeout(_FORK_TIMEOUT_S)
            fds = socket.recv_fds(ours, 1, 1)[1]
            if not fds:
                raise ConnectionResetError("its tokenizer's process has ended")
            ours.settimeout(None)
            self.connection = Frames(socket.socket(fileno=ours.detach()))
        self._pidfd = fds[0]
        weakref.finalize(self, os.close, self._pidfd)
        weakref.finalize(self, self.connection.close)

    def kill(self) -> None:
        """End it, whatever it does."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)


Key = tuple[str, str]  # of a grammar: its owner, who alone finds it, and its source


class _Job:
    """The compilation of a source, and who waits for it."""

    def __init__(self, key: Key) -> None:
        self.key = key
        self.waiting = set[Future[Process]]()
        self.process: Process | None = None
        self.is_done = False
        self._dropped = Event()

    def drop(self) -> None:
        """End its process, now or once it is there."""
        self._dropped.set()
        if self.process is not None:
            self.process.kill()

    def is_dropped(self) -> bool:
        """Return whether all who waited for it have cancelled."""
        return self._dropped.is_set()


class Compiler:
    """Compiles an owner's source once, while it is among the latest. Called from any thread."""

    def __init__(self, tokenizer: Path, vocab_size: int, eos_ids: Sequence[int]) -> None:
        """The tokenizer.json is read by a process that is started for the first grammar."""
        arguments = (str(tokenizer), str(vocab_size), *map(str, eos_ids))
        self._command = python_module(PROGRAM, *arguments)
        self._threads = ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="grammar")
        self._jobs = OrderedDict[Key, _Job]()
        self._refused = OrderedDict[Key, SurestepError]()
        self._lock, self._starting = Lock(), Lock()
        self._template: socket.socket | None = None  # of the process that is forked
        self._end_template: Callable[[], object] = lambda: None

    def start(self, source: str, owner: str = "") -> Future[Process]:
        """Begin to compile a source, unless it is known already as one of this owner.

        A compilation is dropped when all who wait for it have cancelled.

        Only one thread may ask the processes. The future has an InvalidRequest
        for a grammar that is wrong or takes too much, Unavailable where there was no time for it.
        """
        waiter, key = Future[Process](), (owner, source)
        with self._lock:
            refused, job = self._refused.get(key), self._jobs.get(key)
            if refused is None and job is None:
                job = self._jobs[key] = _Job(key)
                self._threads.submit(self._run, job)
                if len(self._jobs) > MAX_CACHED_GRAMMARS:
                    self._give_up_oldest()
            if job is not None:
                self._jobs.move_to_end(key)
                if not job.is_done:
                    job.waiting.add(waiter)
        if refused is not None:
            waiter.set_exception(refused)
        elif job is not None and job.is_done and job.process is not None:
            waiter.set_result(job.process)
        else:
            assert job is not None
            waiter.add_done_callback(lambda done: self._left(job, done))
        return waiter

    def discard(self, source: str, owner: str, process: Process) -> None:
        """Do not give this process, which has ended, to anybody any more."""
        with self._lock:
            if (job := self._jobs.get((owner, source))) is not None and job.process is process:
                del self._jobs[owner, source]

    def _left(self, job: _Job, waiter: Future[Process]) -> None:
        """Drop a compilation when the last who waited for it has cancelled."""
        with self._lock:
            job.waiting.discard(waiter)
            if not waiter.cancelled() or job.waiting or job.is_done:
                return
            self._forget(job)
            job.drop()

    def _give_up_oldest(self) -> None:
        """Give up the oldest process that has compiled; who follows a request with it holds it."""
        oldest = next((key for key, job in self._jobs.items() if job.is_done), None)
        if oldest is not None:
            del self._jobs[oldest]

    def _forget(self, job: _Job) -> None:
        if self._jobs.get(job.key) is job:
            del self._jobs[job.key]

    def _refuse(self, key: Key, error: SurestepError) -> None:
        self._refused[key] = error
        if len(self._refused) > _MAX_REFUSED:
            self._refused.popitem(last=False)

    def _run(self, job: _Job) -> None:
        """Compile, and tell all who wait."""
        error: SurestepError | None = None
        try:
            self._compile(job)
        except SurestepError as known:
            error = known
        except Exception as unknown:  # noqa: BLE001  # no descriptor, no process: those who wait learn of it
            error = Unavailable(
                f"grammar: there is no process for it: {unknown}", retry_after=_RETRY_AFTER_S
            )
        with self._lock:
            job.is_done, waiting = True, list(job.waiting)
            if error is not None:
                self._forget(job)
                if isinstance(error, InvalidRequest):
                    self._refuse(job.key, error)
        for waiter in waiting:
            if waiter.set_running_or_notify_cancel():
                if error is not None:
                    waiter.set_exception(error)
                else:
                    assert job.process is not None
                    waiter.set_result(job.process)

    def _compile(self, job: _Job) -> None:
        """Compile in a process; once more in another, if that is killed without a reason."""
        for _ in range(2):
            process = self._fork()
            with self._lock:
                job.process = process
                if job.is_dropped():
                    return
            began = time.monotonic()
            try:
                process.connection.send(job.key[1])
                error, _ = process.connection.receive_within(_TIMEOUT_S)
            except TimeoutError:
                process.kill()
                message = "grammar: there was no time to compile it"
                raise Unavailable(message, retry_after=_RETRY_AFTER_S) from None
            except (EOFError, OSError, ValueError):
                if job.is_dropped():
                    return
                if time.monotonic() - began >= COMPILE_S:
                    raise took_too_long(COMPILE_S, "compile") from None
                continue
            if error is not None:
                raise error_of(error)
            return
        raise ended_twice()

    def _fork(self) -> Process:
        """Return a new process. Raises OSError."""
        with self._starting:
            try:
                return self._try_fork()
            except OSError:  # the template has been killed, or hangs
                self._end_template()
                self._template = None
                return self._try_fork()

    def _try_fork(self) -> Process:
        if self._template is None:
            self._template = self._start_template()
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                socket.send_fds(self._template, [b"."], [theirs.fileno()])
        except OSError:
            ours.close()
            raise
        return Process(ours)

    def _start_template(self) -> socket.socket:
        """Start the process that reads the tokenizer.

        It ends with the thread that starts it, one of this compiler's.
        """
        environ = child_environ(
            {
                "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),  # the same code as here
                "OPENBLAS_NUM_THREADS": "1",  # numpy's threads would not be there after a fork
            }
        )
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                process = subprocess.Popen(self._command, stdin=theirs.fileno(), env=environ)  # noqa: S603
        except OSError:
            ours.close()
            raise
        self._end_template = weakref.finalize(self, _end, process, ours)
        return ours


def ended_twice() -> InvalidRequest:
    """Return the error of a grammar two of whose processes have ended, as those do that may not
    have more memory."""
    return InvalidRequest("grammar: it takes more memory than it may", param="grammar")


def _end(process: subprocess.Popen[bytes], control: socket.socket) -> None:
    control.close()
    process.kill()
    process.wait()
