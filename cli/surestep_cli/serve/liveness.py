"""Whether the services still give signs of life, and what is done about one that does not.

Some are watched already: a scheduler by its watchdog, a rank by its supervisor. Here the watchers
are watched, with more patience than theirs, so that these act first.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from surestep_common.health_probe import HealthProbe
from surestep_common.notify import Listener

from surestep_cli.api.http import call

from .child import Child

logger = logging.getLogger(__name__)

_LOOK_AT_LOGS_S = 5.0
_LOOK_S = 1.0  # between two looks, and for each of them at most
# Looks without a sign in a row; counted, not timed: this process may have been stopped itself.
_TELL_TO_GO_ON = 4
_END = 12
_END_BEFORE_FIRST = 120  # of a process that has never given one


class Probe(Protocol):
    """Something that a service does only while it lives."""

    async def seen(self) -> bool:
        """Whether it does; answered within _LOOK_S."""

    async def close(self) -> None:
        """Look no more."""


class HttpProbe:
    """The gateway answers, whatever it says, and whatever certificate it shows: the files may have
    been renewed since it has started."""

    def __init__(self, url: str) -> None:
        self._url = url

    async def seen(self) -> bool:
        """See Sign."""
        try:
            await asyncio.to_thread(call, self._url, timeout_s=_LOOK_S, verify=False)
        except OSError as error:
            return not _is_silence(error)
        return True

    async def close(self) -> None:
        """See Sign."""


def _is_silence(error: OSError) -> bool:
    """A connection that is closed is an answer too: there are too many. And what keeps this process
    from asking, a name that is not found, say, is nobody's silence."""
    reason = getattr(error, "reason", error)  # of an URLError
    return isinstance(reason, TimeoutError | ConnectionRefusedError)


class GrpcProbe:
    """The health service of a scheduler or supervisor answers, whatever it says."""

    def __init__(self, address: str) -> None:
        self._probe = HealthProbe(address)

    async def seen(self) -> bool:
        """See Sign."""
        return await self._probe.answers(_LOOK_S)

    async def close(self) -> None:
        """See Sign."""
        await self._probe.close()


class HeartbeatProbe:
    """A watchdog sends signs of life. Nobody else would notice that it has stopped watching."""

    def __init__(self, listener: Listener) -> None:
        self._listener = listener

    async def seen(self) -> bool:
        """See Sign."""
        return self._listener.heard()

    async def close(self) -> None:
        """See Sign."""
        self._listener.close()


async def watch(child: Child, signs: Sequence[Probe]) -> None:
    """See to it that a child gives all of these signs, until cancelled."""
    vigil = LivenessCheck(child)
    try:
        while True:
            began = time.monotonic()
            try:
                seen = await asyncio.gather(*(sign.seen() for sign in signs))
            except RuntimeError as error:  # no thread to look with, which is nobody's silence
                logger.warning("cannot look after %s: %s", child.command.name, error)
            else:
                await vigil.looked(alive=all(seen))
            await asyncio.sleep(max(began + _LOOK_S - time.monotonic(), 0))
    finally:
        for sign in signs:
            await sign.close()


async def watch_logs(folder: Path) -> None:
    """Tell when the logs cannot be had any more, and when they can again, until cancelled."""
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
    """What a child has come to."""

    def __init__(self, child: Child) -> None:
        self._child = child
        self._pid: int | None = None
        self._known = False  # this process has given a sign
        self._misses = 0

    async def looked(self, *, alive: bool) -> None:
        """Act on what was seen: a silent process is told to go on, at last it is ended."""
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
            logger.warning("%s gives no sign of life for %.0f s: told to go on", name, seconds)
            child.resume()
        elif self._misses >= (_END if self._known else _END_BEFORE_FIRST):
            logger.error("%s gives no sign of life for %.0f s: killed", name, seconds)
            with contextlib.suppress(ProcessLookupError):
                await child.end()
