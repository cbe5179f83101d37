"""Small facts about being a process among parents and children."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import os
import resource
import signal
import struct
import sys
from pathlib import Path

STACK_DUMP_SIGNAL = signal.SIGUSR1
STOPPED, TRACED, ENDING, DEAD = "T", "t", "Z", "X"  # states of a process
CREDENTIALS = struct.Struct("3i")  # process, user and group at the other end of a socket
_FLAGS, _PF_EXITING = 6, 4  # behind the name in /proc/PID/stat
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_LIBC = ctypes.CDLL(None)  # opened here: between fork and exec nothing should be
_GARBAGE = 10_000  # new objects until the youngest are looked at; Python's 700 come with every step
_MOST_FILES = 1 << 20  # some systems allow any number, and some libraries count up to it
_OTHER_FILES = 128  # that no client has
_MEMORY_LIMITS = ("memory.max", "memory/memory.limit_in_bytes")  # of control groups, v2 and v1


def python_module(module: str, *arguments: str) -> tuple[str, ...]:
    """Return the command that runs a module of ours with this interpreter.

    The working folder is no place for modules: it may be a model folder, which must not run code.
    """
    return (sys.executable, "-P", "-m", module, *arguments)


def dump_stacks_on_signal(*, and_end: bool = False) -> None:
    """Write the Python stacks of all threads to stderr on STACK_DUMP_SIGNAL, and on a crash.

    Works while the interpreter is blocked, because the handler is native code. With `and_end` the
    signal's default action follows, which shows the sender that the dump is complete.
    """
    faulthandler.enable()
    faulthandler.register(STACK_DUMP_SIGNAL, all_threads=True, chain=and_end)


def end_on_sigterm() -> None:
    """Let SIGTERM end this process at once, until it has a handler that knows better.

    Called before the imports that take long: to process 1 of a container the kernel delivers no
    signal that it has no handler for, and stopping it would take the whole grace period.
    """
    signal.signal(signal.SIGTERM, lambda number, _: os._exit(128 + number))


def die_with_parent() -> None:
    """Ask the kernel to kill this process when its parent ends, however it ends (Linux).

    Called first thing by processes that make no sense alone: no orphan outlives a `kill -9`.
    The parent must be single-threaded at the spawn or spawn from a thread that lives as long as it:
    the signal follows the spawning thread.
    """
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def outlive_parent() -> None:
    """Take back what `die_with_parent` asked for."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, 0)


def die_with(parent: int | None) -> None:
    """Do the same for processes that make sense alone, too, if `parent` started this one."""
    if parent is None:
        return
    die_with_parent()
    if os.getppid() != parent:  # it ended before it could be asked for
        sys.exit(f"the process {parent} that has started this one is gone")


def adopt_orphans(whether: bool) -> None:
    """Be the parent of descendants whose parent ends (Linux), as long as this process waits for
    one: the others become zombies.
    """
    _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, int(whether))


def collect_seldom() -> None:
    """Look for cyclic garbage seldom, and never among what was imported. Called before serving."""
    gc.freeze()
    gc.set_threshold(_GARBAGE)


def prefer_as_victim(score: int) -> None:
    """Let the kernel end this process rather than others when memory runs out; 0 to 1000."""
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(str(score))


def state_of(pid: int) -> str:
    """Return a letter as in proc(5): DEAD if the process is gone, ENDING if it will be."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return DEAD
    fields = stat.rpartition(")")[2].split()
    # Its connections are closed before it is a zombie, which may take a while.
    return ENDING if int(fields[_FLAGS]) & _PF_EXITING else fields[0]


def raise_file_limit() -> int:
    """Let this process and its children open as many files as the system allows; return how many.

    The soft limit is often 1024 for the sake of programs that use select(2).
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_FILES)
    if soft == resource.RLIM_INFINITY or soft >= most:
        return most
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    return most


def clients_within(files: int) -> int:
    """Return how many client connections a process may have that may open so many files."""
    return max(files - _OTHER_FILES, files // 4, 1)


def memory_bytes() -> int:
    """Return the memory for this process: the machine's, or its container's if that is less."""
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limits = [_number(Path("/sys/fs/cgroup") / name) for name in _MEMORY_LIMITS]
    return min([machine, *(limit for limit in limits if limit)])


def _number(path: Path) -> int:
    try:
        text = path.read_text().strip()
    except OSError:
        return 0
    return int(text) if text.isdecimal() else 0
