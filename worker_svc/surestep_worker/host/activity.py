"""Tell from the kernel whether a process that is late hangs, or had no turn."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from surestep_common.process import STOPPED, TRACED, state_of
from surestep_proto import supervisor_pb2 as pb

_LOOKS = 10
_AWAKE = frozenset("RD")  # states of threads that run, or would if they had a core or a disk
_MOSTLY = 0.5  # share of the looks
_OWN_CORE = 0.75  # share of a core: a process with less of it than that waits for more
_STATE, _PARENT, _UTIME, _STIME = 0, 1, 11, 12  # behind the name in /proc/PID/stat
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")


class _Look(NamedTuple):
    """The threads of a process and of its descendants at one moment."""

    awake: bool  # one of them
    cpu_s: float  # that they have had, together


async def observe(pid: int, seconds: float) -> pb.Activity:
    """Watch a process with all its descendants for so long.

    One that is due to answer and AT_REST will not: it is stopped, or deadlocked.
    """
    family = _family(pid)
    began, looks = time.monotonic(), [_look(family)]
    for _ in range(_LOOKS):
        await asyncio.sleep(seconds / _LOOKS)
        looks.append(_look(family))
    cores = (looks[-1].cpu_s - looks[0].cpu_s) / (time.monotonic() - began)
    if cores >= _OWN_CORE:
        return pb.RUNNING
    awake = sum(look.awake for look in looks) >= _MOSTLY * len(looks)
    return pb.WAITING if awake else pb.AT_REST


def is_stopped(pid: int) -> bool:
    """Return whether a process was stopped by a signal or a debugger."""
    return state_of(pid) in (STOPPED, TRACED)


def _look(processes: Iterable[int]) -> _Look:
    threads = [stat for pid in processes for stat in _stats(f"/proc/{pid}/task")]
    ticks = sum(int(stat[_UTIME]) + int(stat[_STIME]) for _, stat in threads)
    return _Look(any(stat[_STATE] in _AWAKE for _, stat in threads), ticks * _TICK_S)


def _family(pid: int) -> set[int]:
    """Return a process and its descendants."""
    parents = {child: int(stat[_PARENT]) for child, stat in _stats("/proc")}
    family, known = {pid}, 0
    while len(family) > known:
        known = len(family)
        family |= {child for child, parent in parents.items() if parent in family}
    return family


def _stats(folder: str) -> Iterator[tuple[int, list[str]]]:
    """Yield the ids of the processes or threads in a folder, and what is behind their names."""
    for path in Path(folder).glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            yield int(path.parent.name), path.read_text().rpartition(")")[2].split()
