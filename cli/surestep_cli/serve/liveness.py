"""Liveness of the services, and the restart of one that stops responding.

The gateway, the scheduler's watchdog and each rank's supervisor tell that their event loop runs.
Whether scheduler and rank respond is for those two to say, whose timeouts are shorter.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from pathlib import Path

from surestep_common.notify import Listener

from .child import Child

logger = logging.getLogger(__name__)

_LOOK_AT_LOGS_S = 5.0
_LOOK_S = 1.0  # between two looks
# Looks without a sign in a row; counted, not timed: this process may have been stopped itself.
_TELL_TO_GO_ON = 4
_END = 12
_END_BEFORE_FIRST = 120  # of a process that has never given a sign


async def watch(child: Child, signs: Listener) -> None:
    """Enforce that a child gives signs of life, until cancelled."""
    check = LivenessCheck(child)
    while True:
        await check.looked(alive=signs.heard())
        await asyncio.sleep(_LOOK_S)


async def watch_logs(folder: Path) -> None:
    """Log when the log folder becomes unusable, and when it is usable again, until cancelled."""
    told = ""
    while True:
        trouble = _trouble_of(folder)
        if trouble != told:
            logger.warning("logs in %s: %s", folder, trouble or "can be written again")
        told = trouble
        await asyncio.sleep(_LOOK_AT_LOGS_S)


def _trouble_of(folder: Path) -> str:
    try:
        room = os.statvfs(folder)
    except OSError as error:
        return f"{error.strerror}; made again when a service is started"
    return "" if room.f_bavail else "the disk is full, what the services write now is lost"


class LivenessCheck:
    """The state of one child between looks."""

    def __init__(self, child: Child) -> None:
        self._child = child
        self._pid: int | None = None
        self._known = False  # this process has given a sign
        self._misses = 0

    async def looked(self, *, alive: bool) -> None:
        """Act on what was heard: a silent process gets SIGCONT, and is killed at last."""
        child = self._child
        if child.pid != self._pid or child.stopping:
            self._pid, self._known, self._misses = child.pid, False, 0
        if self._pid is None or child.stopping:
            return
        if alive:
            self._known, self._misses = True, 0
            return
        self._misses += 1
        name, seconds = child.command.name, self._misses * _LOOK_S
        if self._misses == _TELL_TO_GO_ON and self._known:
            logger.warning("%s gives no sign of life for %.0f s: resuming it", name, seconds)
            child.resume()
        elif self._misses >= (_END if self._known else _END_BEFORE_FIRST):
            logger.error("%s gives no sign of life for %.0f s: killed", name, seconds)
            with contextlib.suppress(ProcessLookupError):
                await child.end()
