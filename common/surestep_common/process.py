"""Small facts about being a process among parents and children."""

from __future__ import annotations

import ctypes
import faulthandler
import signal

STACK_DUMP_SIGNAL = signal.SIGUSR1
_PR_SET_PDEATHSIG = 1


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
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
