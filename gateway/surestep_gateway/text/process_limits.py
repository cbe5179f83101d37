"""Limits on templates and grammars, which may compute without end and fill the memory."""

from __future__ import annotations

import contextlib
import resource
import signal
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

from surestep_common.errors import InvalidRequest

TOO_MUCH_COMPUTING = signal.SIGPROF  # ends a process at its limit, native code included
_AGAIN_S = 0.5  # Jinja swallows errors in what it takes for constants


class NeedsProcess(Exception):
    """The request must be prepared in a text process, because its work has no known bound."""


def limit_memory(num_bytes: int) -> None:
    """Limit memory to `num_bytes` more than is in use now."""
    status = Path("/proc/self/status").read_text()
    now = int(status.partition("VmData:")[2].split()[0]) << 10
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (now + num_bytes, hard))


@contextlib.contextmanager
def computing_limit(limit_s: float) -> Iterator[None]:
    """Let the system end this process once it has computed for `limit_s`.

    Time in which others have the CPU does not count, so that a busy machine is no request's fault.
    """
    signal.setitimer(signal.ITIMER_PROF, limit_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


class TurnLimit:
    """Raises NeedsProcess where pure Python code on the main thread computes for too long.

    Only computing counts, that of all threads of the process, and nothing is raised after the end.
    """

    _entered: TurnLimit | None = None

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        signal.signal(signal.SIGVTALRM, self._late)  # here: it takes longer than most templates

    def __enter__(self) -> None:
        TurnLimit._entered = self
        signal.setitimer(signal.ITIMER_VIRTUAL, self._limit_s, self._limit_s)

    def __exit__(self, *error: object) -> None:
        TurnLimit._entered = None
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)

    @staticmethod
    def _late(number: int, frame: FrameType | None) -> None:
        if TurnLimit._entered is not None:
            raise NeedsProcess(f"it did not end within {TurnLimit._entered._limit_s:g} s")


@contextlib.contextmanager
def template_limits(limit_s: float, num_bytes: int) -> Iterator[None]:
    """Limit pure Python code: MemoryError above `num_bytes`, InvalidRequest after `limit_s`.

    For the main thread of a process that has no other use for SIGALRM.
    """
    over = False

    def late(number: int, frame: FrameType | None) -> None:
        if not over:
            raise InvalidRequest(
                f"chat template: it did not end within {limit_s:g} s", param="messages"
            )

    memory = resource.getrlimit(resource.RLIMIT_DATA)
    before = signal.signal(signal.SIGALRM, late)
    limit_memory(num_bytes)
    signal.setitimer(signal.ITIMER_REAL, limit_s, _AGAIN_S)
    try:
        yield
    finally:
        over = True
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        resource.setrlimit(resource.RLIMIT_DATA, memory)
