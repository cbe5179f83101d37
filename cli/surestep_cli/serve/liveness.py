"""Liveness of the services, and the restart of one that stops responding.

Some are supervised already: a scheduler by its watchdog, a rank by its supervisor. Here the
supervisors are supervised, with longer timeouts than theirs, so that they act first.
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
    """A way to see that a service lives."""

    async def seen(self) -> bool:
        """Return whether the service has responded within _LOOK_S."""

    async def close(self) -> None:
        """Stop probing."""


class HttpProbe:
    """Probe of the gateway, content with any status and any certificate: the files may have been
    renewed since it started. A flood of connections can keep the question waiting: then the beats
    of its event loop say that it lives.
    """

    def __init__(self, url: str, beats: Listener | None = None) -> None:
        self._url, self._beats = url, beats

    async def seen(self) -> bool:
        try:
            await asyncio.to_thread(call, self._url, timeout_s=_LOOK_S, verify=False)
        except OSError as error:
            beats = self._beats is not None and self._beats.heard()
            return beats or not _is_silence(error)
        return True

    async def close(self) -> None:
        if self._beats is not None:
            self._beats.close()


def _is_silence(error: OSError) -> bool:
    """Return whether an error means that the service does not respond.

    A closed connection is a response too: there are too many. And errors on our side, such as a
    name that is not found, say nothing about the service.
    """
    reason = getattr(error, "reason", error)  # of an URLError
    return isinstance(reason, TimeoutError | ConnectionRefusedError)


class GrpcProbe:
    """Probe of the health service of a scheduler or supervisor, content with any status."""

    def __init__(self, address: str) -> None:
        self._probe = HealthProbe(address)

    async def seen(self) -> bool:
        return await self._probe.answers(_LOOK_S)

    async def close(self) -> None:
        await self._probe.close()


class HeartbeatProbe:
    """Probe of a watchdog's heartbeats; nothing else would notice that it has stopped."""

    def __init__(self, listener: Listener) -> None:
        self._listener = listener

    async def seen(self) -> bool:
        return self._listener.heard()

    async def close(self) -> None:
        self._listener.close()


async def watch(child: Child, probes: Sequence[Probe]) -> None:
    """Enforce that a child passes all of these probes, until cancelled."""
    check = LivenessCheck(child)
    try:
        while True:
            began = time.monotonic()
            try:
                seen = await asyncio.gather(*(probe.seen() for probe in probes))
            except RuntimeError as error:  # no thread for the probe: not a failed probe
                logger.warning("cannot look after %s: %s", child.command.name, error)
            else:
                await check.looked(alive=all(seen))
            await asyncio.sleep(max(began + _LOOK_S - time.monotonic(), 0))
    finally:
        for probe in probes:
            await probe.close()


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
    """The state of one child between probes."""

    def __init__(self, child: Child) -> None:
        self._child = child
        self._pid: int | None = None
        self._known = False  # this process has given a sign
        self._misses = 0

    async def looked(self, *, alive: bool) -> None:
        """Act on a probe's result: a silent process gets SIGCONT, and is killed at last."""
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
