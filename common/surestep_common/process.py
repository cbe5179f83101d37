"""Small facts about being a process among parents and children."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import signal
import sys
from pathlib import Path

STACK_DUMP_SIGNAL = signal.SIGUSR1
STOPPED, TRACED, DEAD = "T", "t", "X"  # states of a process
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)  # opened here: between fork and exec nothing should be


def dump_stacks_on_signal(*, and_end: bool = False) -> None:
    """Write the Python stacks of all threads to stderr on STACK_DUMP_SIGNAL, and on a crash.

    Works while the interpreter is blocked, because the handler is native code. With `and_end` the
    signal's default action follows: whoever sent it need not guess when the dump is complete.
    """
    faulthandler.enable()
    faulthandler.register(STACK_DUMP_SIGNAL, all_threads=True, chain=and_end)


def die_with_parent() -> None:
    """Ask the kernel to kill this process when its parent ends, however it ends (Linux).

    Called first thing by processes that make no sense alone: no orphan outlives a `kill -9`.
    The parent must be single-threaded at the spawn or spawn from a thread that lives as long as it:
    the signal follows the spawning thread.
    """
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def die_with(parent: int | None) -> None:
    """The same for processes that make sense alone, too, if `parent` has started this one."""
    if parent is None:
        return
    die_with_parent()
    if os.getppid() != parent:  # it ended before it could be asked for
        sys.exit(f"the process {parent} that has started this one is gone")


def prefer_as_victim(score: int) -> None:
    """When memory runs out the kernel shall end this process rather than others; 0 to 1000."""
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(str(score))


def state_of(pid: int) -> str:
    """One letter, as in proc(5). DEAD for a process that is gone, "Z" for one nobody waited for."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return DEAD
    return stat.rpartition(")")[2].split()[0]
