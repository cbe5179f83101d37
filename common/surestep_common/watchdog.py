"""`python -m surestep_common.watchdog HOST:PORT -- COMMAND...`: ends a service that hangs.

A supervisor that starts what has ended does not see what hangs: stopped, or stuck in a call that
holds the interpreter. The watchdog runs COMMAND as its child and asks the gRPC service at
HOST:PORT; any answer will do, because it takes a running event loop to give one. Once the service
has answered, three seconds of silence are too many: a stopped process is made to go on; of any
other the stacks go to its log, and it is killed. The exit status is the child's, 128 + N after
signal N. SIGTERM and SIGINT are passed on. What watches the watchdog gives it an address for signs
of life: see notify.py.

With `--standby` as the first argument there is a second process, which has imported everything and
takes over when the first one ends after it has served. The watchdog starts it with `--standby`
behind the arguments of the service, and with a pipe as its standard input. A line is its turn; the
end of the pipe means that the watchdog is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
from asyncio.subprocess import Process
from collections.abc import Awaitable, Callable, Sequence

from .config import ENV_PREFIX, child_environ, variables
from .process import (
    STACK_DUMP_SIGNAL,
    STOPPED,
    die_with_parent,
    dump_stacks_on_signal,
    end_on_sigterm,
    state_of,
)

logger = logging.getLogger(__name__)

STANDBY = "--standby"
_PROBE_TIMEOUT_S = 0.8
_PROBE_INTERVAL_S = 0.5  # each costs the service and this process a millisecond
_MISSES = 3  # probes in a row; counted, not timed: the watchdog may have been stopped itself
_STACK_DUMP_S = 0.3  # for the child to write its stacks, if it still can
_STANDBY_DELAY_S = 2.0  # of a standby, behind the start of the service
_USAGE = (
    "usage: python -m surestep_common.watchdog [--standby] HOST:PORT -- COMMAND [ARGUMENT...]\n"
)
_USAGE_ERROR = 2


class Watchdog:
    """Runs a command, and with a standby runs it again when it ends after it has served."""

    def __init__(self, address: str, command: Sequence[str], *, has_standby: bool) -> None:
        self._address = address
        self._command = command
        self._has_standby = has_standby
        self._stopping = asyncio.Event()
        self._process: Process
        self._standby: Process | None = None

    async def run(self) -> int:
        """Return the exit status for this process."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._pass_on, number)
        self._process = await _spawn(self._command)
        while True:
            code = await self._live(self._process)
            standby, self._standby = self._standby, None
            if standby is None or standby.returncode is not None or self._stopping.is_set():
                await _end(standby)
                return code if code >= 0 else 128 - code
            logger.error(
                "pid %d ended (status %d): pid %d, its standby, takes over",
                self._process.pid,
                code,
                standby.pid,
            )
            self._process = standby
            assert standby.stdin is not None
            standby.stdin.write(b"\n")  # one that has just died shows it by its exit

    def _pass_on(self, number: int) -> None:
        self._stopping.set()
        _send(self._process, number)

    async def _live(self, process: Process) -> int:
        serving = asyncio.Event()
        async with asyncio.TaskGroup() as tasks:
            helpers = [
                tasks.create_task(
                    _end_when_silent(process, self._address, serving, self._stopping)
                ),
                tasks.create_task(self._prepare_standby(serving)),
            ]
            code = await process.wait()
            for helper in helpers:
                helper.cancel()
        return code

    async def _prepare_standby(self, serving: asyncio.Event) -> None:
        """Start the standby when the service has begun to serve, and has had the cores first."""
        await serving.wait()
        while self._has_standby:
            await asyncio.sleep(_STANDBY_DELAY_S)
            self._standby = await _spawn((*self._command, STANDBY), stdin=asyncio.subprocess.PIPE)
            await self._standby.wait()  # the service may go on all the same


def wait_for_turn(arguments: list[str]) -> None:
    """Wait, in a process whose arguments say that it is a standby; remove the one that says so."""
    if STANDBY not in arguments:
        return
    arguments.remove(STANDBY)
    if not os.read(sys.stdin.fileno(), 1):
        sys.exit("the watchdog of this standby is gone")


async def _spawn(command: Sequence[str], stdin: int | None = None) -> Process:
    environ = child_environ(variables(ENV_PREFIX))
    return await asyncio.create_subprocess_exec(
        *command, stdin=stdin, env=environ, preexec_fn=die_with_parent
    )


async def _end_when_silent(
    process: Process, address: str, serving: asyncio.Event, stopping: asyncio.Event
) -> None:
    """Kill a process that has answered, which sets `serving`, and does not any more; one that stops
    may take its time.
    """
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
        serving.set()
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


async def _end(standby: Process | None) -> None:
    if standby is not None and standby.returncode is None:
        standby.kill()
        await standby.communicate()  # which closes its pipe while there is a loop


def _send(process: Process, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(number)


def main(arguments: Sequence[str]) -> int:
    """Exit status."""
    has_standby = arguments[:1] == [STANDBY]
    match list(arguments[has_standby:]):
        case [address, "--", *command] if command:
            end_on_sigterm()
            die_with_parent()
            dump_stacks_on_signal()
            return asyncio.run(Watchdog(address, command, has_standby=has_standby).run())
        case _:
            sys.stderr.write(_USAGE)
            return _USAGE_ERROR


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
