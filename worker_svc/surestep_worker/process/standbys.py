"""The processes that wait to become a rank: a standby, and the template that it is a copy of.

A template has imported what a rank needs, which takes seconds, and does nothing but leave copies of
itself, which takes milliseconds: there is another standby as soon as one has become the rank.
It is itself a copy that the first rank left of itself before it loaded anything.
Where both have ended together with the rank, the next one starts from scratch.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import sys
from collections.abc import Sequence

from surestep_common.process import adopt_orphans

from surestep_worker.config import WorkerSettings
from surestep_worker.host.host_memory import free_memory

from .rank_process import RankProcess

logger = logging.getLogger(__name__)

BACKOFF_S = (0.0, 0.5, 1.0, 2.0, 5.0)  # by consecutive failures
_DELAY_S = 2.0  # before a template is started: the cores are the rank's own at first
_TEMPLATE_BYTES = 400 << 20  # torch when imported, and a reserve for other processes


class Standbys:
    """The standby of a rank and its template. `keep` is run beside a rank, `take` without one."""

    def __init__(
        self, command: Sequence[str], settings: WorkerSettings, first: RankProcess | None
    ) -> None:
        """`command` starts a standby; `first` is one that was started before."""
        self._command, self._settings = command, settings
        self._standby = first
        self._template: RankProcess | None = None
        self._ordered: socket.socket | None = None  # to a copy that may not be there yet

    @property
    def pid(self) -> int:
        """The process id of the standby; 0 = none has everything imported."""
        standby = self._standby
        return standby.pid if standby is not None and standby.imported else 0

    async def take(self) -> RankProcess:
        """Return the process that becomes the rank, and first leaves a copy of itself if there is
        no template. Raises OSError if none can be started."""
        process = await self._living() or await RankProcess.spawn(self._command, self._settings)
        if self._settings.standby and self._template is None:
            with contextlib.suppress(OSError):  # a template is started later
                self._order(process)
        return process

    async def _living(self) -> RankProcess | None:
        while (process := self._pop() or await self._ordered_copy()) is not None:
            if process.alive:
                return process
            process.close()  # it ended together with the rank
        return None

    def _pop(self) -> RankProcess | None:
        popped = self._standby or self._template
        if self._standby is None:
            self._template = None
        self._standby = None
        return popped

    async def keep(self) -> None:
        """Keep a template, and a standby copied from it, beside a rank that is ready."""
        for attempt in range(sys.maxsize):
            if self._template is None:  # a standby without one can be copied as well
                self._template, self._standby = self._standby, None
            if self._template is None:
                self._template = await self._ordered_copy() or await self._spawn()
            template = self._template
            async with asyncio.TaskGroup() as tasks:
                keeping = tasks.create_task(self._keep_standby(template))
                exit_reason = await template.wait()
                keeping.cancel()
            self._template = None
            if self._standby is template:
                self._standby = None
            template.close()
            logger.warning("template, pid %d, ended: %s", template.pid, exit_reason.reason)
            await asyncio.sleep(back_off_s(attempt + 1))

    async def _spawn(self) -> RankProcess:
        """Start a template as soon as there is memory for one."""
        await asyncio.sleep(_DELAY_S)
        said = ""
        while True:
            try:
                if (left := free_memory()).nbytes >= _TEMPLATE_BYTES:
                    return await RankProcess.spawn(self._command, self._settings, spare=True)
                reason = str(left)
            except OSError as error:
                reason = str(error)
            if not said:
                logger.warning("rank %d has no standby: %s", self._settings.rank, reason)
            said = reason
            await asyncio.sleep(BACKOFF_S[-1])

    async def _keep_standby(self, template: RankProcess) -> None:
        """Keep a copy of the template, or the template itself if it cannot be copied."""
        if not await template.prepared():
            return
        for attempt in range(sys.maxsize):
            try:
                standby = self._standby = self._standby or await self._copy(template)
            except OSError as error:
                logger.warning("standby, pid %d, is not copied: %s", template.pid, error)
                self._standby, self._template = template, None
                return
            logger.info("rank %d has a standby, pid %d", self._settings.rank, standby.pid)
            exit_reason = await standby.wait()
            standby.close()
            self._standby = None
            logger.warning("standby, pid %d, ended: %s", standby.pid, exit_reason.reason)
            await asyncio.sleep(back_off_s(attempt + 1))

    async def _copy(self, template: RankProcess) -> RankProcess:
        """Have a copy made. An order outlives the rank beside which it was given."""
        return await self._copied(self._order(template))

    def _order(self, process: RankProcess) -> socket.socket:
        """Have a process leave a copy, unless one is ordered. Return the socket to the copy. Raises
        OSError."""
        adopt_orphans(True)
        try:
            self._ordered = self._ordered or process.order_copy()
        except OSError:
            self._forget_order()
            raise
        return self._ordered

    async def _copied(self, ordered: socket.socket) -> RankProcess:
        """Wait for the copy that was ordered. Raises OSError if there will be none."""
        try:
            copy = await RankProcess.copied(ordered)
        except OSError:
            self._forget_order()
            raise
        self._ordered = None
        adopt_orphans(False)
        return copy

    async def _ordered_copy(self) -> RankProcess | None:
        """Wait for the copy that was ordered, if any. Return None if there will be none."""
        if self._ordered is not None:
            with contextlib.suppress(OSError):
                return await self._copied(self._ordered)
        return None

    def _forget_order(self) -> None:
        adopt_orphans(False)
        if self._ordered is not None:
            self._ordered.close()
            self._ordered = None

    async def terminate(self) -> None:
        """End them all."""
        self._forget_order()
        held = [each for each in (self._standby, self._template) if each is not None]
        await asyncio.gather(*(process.terminate() for process in held))


def back_off_s(failures: int) -> float:
    """Return the seconds to wait after so many failures in a row."""
    return BACKOFF_S[min(failures, len(BACKOFF_S) - 1)]
