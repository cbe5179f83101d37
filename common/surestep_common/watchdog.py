"""`python -m surestep_common.watchdog HOST:PORT -- COMMAND...`: ends a service that hangs.

A supervisor that starts what has ended does not see what hangs: stopped, or stuck in a call that
holds the interpreter. The watchdog runs COMMAND as its child and asks the gRPC service at
HOST:PORT; any answer will do, because it takes a running event loop to give one. Once the service
has answered, three seconds of silence are too many: a stopped process is made to go on; of any
other the stacks go to its log, and it is killed. The exit status is the child's, 128 + N after
signal N. SIGTERM and SIGINT are passed on. What watches the watchdog gives it an address for signs
of life: see notify.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import sys
from collections.abc import Awaitable, Callable, Sequence

from .process import (
    STACK_DUMP_SIGNAL,
    STOPPED,
    die_with_parent,
    dump_stacks_on_signal,
    end_on_sigterm,
    state_of,
)

logger = logging.getLogger(__name__)

_PROBE_TIMEOUT_S = 0.8
_PROBE_INTERVAL_S = 0.5  # each costs the service and this process a millisecond
_MISSES = 3  # probes in a row; counted, not timed: the watchdog may have been stopped itself
_STACK_DUMP_S = 0.3  # for the child to write its stacks, if it still can
_USAGE = "usage: python -m surestep_common.watchdog HOST:PORT -- COMMAND [ARGUMENT...]\n"
_USAGE_ERROR = 2


async def watch(address: str, command: Sequence[str]) -> int:
    """Run `command` to its end; return the exit status for this process."""
    process = await asyncio.create_subprocess_exec(*command, preexec_fn=die_with_parent)
    stopping = asyncio.Event()

    def pass_on(number: int) -> None:
        stopping.set()
        _send(process, number)

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, pass_on, number)
    async with asyncio.TaskGroup() as tasks:
        watching = tasks.create_task(_end_when_silent(process, address, stopping))
        code = await process.wait()
        watching.cancel()
    return code if code >= 0 else 128 - code


async def _end_when_silent(
    process: asyncio.subprocess.Process, address: str, stopping: asyncio.Event
) -> None:
    """Kill a process that has answered and does not any more; one that stops may take its time."""
    # Half a second of imports, which the child is not kept waiting for.
    from . import access, log
    from .health_probe import HealthProbe
    from .notify import ALIVE, READY, Notifier

    log.configure("watchdog")
    access.use(access.PeerSettings.load([]))
    notifier, pid = Notifier(), process.pid
    async with HealthProbe(address) as probe:

        async def answers() -> bool:
            notifier.tell(ALIVE)
            return await probe.answers(_PROBE_TIMEOUT_S)

        while not await answers():
            pass  # it starts
        logger.info("watching pid %d", pid)
        notifier.tell(READY)
        await _until_silent(answers)
        while state_of(pid) == STOPPED:
            logger.error("%s does not answer: pid %d is stopped: resuming it", address, pid)
            _send(process, signal.SIGCONT)
            await _until_silent(answers)
    if stopping.is_set():
        return
    logger.error("%s does not answer any more: pid %d dumps its stacks and is killed", address, pid)
    _send(process, STACK_DUMP_SIGNAL)
    await asyncio.sleep(_STACK_DUMP_S)
    _send(process, signal.SIGKILL)


async def _until_silent(answers: Callable[[], Awaitable[bool]]) -> None:
    misses = 0
    while misses < _MISSES:
        if await answers():
            misses = 0
            await asyncio.sleep(_PROBE_INTERVAL_S)
        else:
            misses += 1


def _send(process: asyncio.subprocess.Process, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(number)


def main(arguments: Sequence[str]) -> int:
    """Exit status."""
    match list(arguments):
        case [address, "--", _, *_]:
            end_on_sigterm()
            die_with_parent()
            dump_stacks_on_signal()
            return asyncio.run(watch(address, arguments[2:]))
        case _:
            sys.stderr.write(_USAGE)
            return _USAGE_ERROR


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
