"""A standby: a process that has imported everything and waits for its turn to serve.

Its watchdog starts it with `--standby` behind the arguments of the service, and with a pipe as its
standard input. A line is its turn; the end of the pipe means that the watchdog is gone.
"""

from __future__ import annotations

import asyncio
import os
import sys

STANDBY = "--standby"


def tell_turn(stdin: asyncio.StreamWriter | None) -> None:
    """Tell a standby that it is its turn. One that has just died shows it by its exit."""
    assert stdin is not None
    stdin.write(b"\n")


def wait_for_turn(arguments: list[str]) -> None:
    """Wait, in a process whose arguments say that it is a standby; remove the one that says so."""
    if STANDBY not in arguments:
        return
    arguments.remove(STANDBY)
    if not os.read(sys.stdin.fileno(), 1):
        sys.exit("the watchdog of this standby is gone")
