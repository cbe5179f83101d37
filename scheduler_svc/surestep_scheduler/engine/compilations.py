"""Choose the next grammar to compile: few at once, to leave the rank's processors to steps,
and only some of one tenant, so that it leaves some to others."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Callable

from surestep_common.errors import QueueFull, Unavailable

from surestep_scheduler.core.sequence import Request

from .workers import WorkerGroup

AT_ONCE = 4
AT_ONCE_OF_TENANT = 3
MOST_WAITING_OF_TENANT = 32
_WAIT_S = 10.0
_POLL_S = 0.2
_RETRY_AFTER_S = 2.0


class Compilations:
    """Compilations that run or wait, each with its tenant."""

    def __init__(self, wait_s: float = _WAIT_S) -> None:
        self._wait_s = wait_s
        self._running = Counter[str]()
        self._waiting = dict[asyncio.Future[None], str]()  # tenants, in the order of arrival

    async def compile(self, request: Request, group: Callable[[], WorkerGroup | None]) -> None:
        """Compile a request's grammar on the group that there is, waiting for one that comes.

        Raises as `turn` and WorkerGroup.compile do, unless the request has delivered tokens.
        """
        try:
            async with self.turn(request.tenant):
                while not await _try(group(), request):  # noqa: ASYNC110
                    await asyncio.sleep(_POLL_S)  # new workers are on their way
        except (QueueFull, Unavailable):
            if not request.emitted_ids:
                raise

    @contextlib.asynccontextmanager
    async def turn(self, tenant: str) -> AsyncIterator[None]:
        """Wait for the tenant's turn, which lasts as long as the block.

        Raises QueueFull if too many of this tenant wait, Unavailable if the turn does not come.
        """
        if list(self._waiting.values()).count(tenant) >= MOST_WAITING_OF_TENANT:
            raise QueueFull(
                f"{MOST_WAITING_OF_TENANT} grammars are waiting already", retry_after=_RETRY_AFTER_S
            )
        admitted = asyncio.get_running_loop().create_future()
        self._waiting[admitted] = tenant
        self._admit()
        try:
            await self._wait(admitted)
            yield
        finally:
            if self._waiting.pop(admitted, None) is None:  # it has had its turn
                self._running[tenant] -= 1
                self._admit()

    async def _wait(self, admitted: asyncio.Future[None]) -> None:
        try:
            async with asyncio.timeout(self._wait_s):
                await admitted
        except TimeoutError:
            raise Unavailable(
                "grammar: others are being compiled", retry_after=_RETRY_AFTER_S
            ) from None

    def _admit(self) -> None:
        """Begin those whose turn it is: first those of tenants that have fewest running."""
        while self._running.total() < AT_ONCE:
            allowed = [
                (self._running[tenant], number, admitted)
                for number, (admitted, tenant) in enumerate(self._waiting.items())
                if self._running[tenant] < AT_ONCE_OF_TENANT
            ]
            if not allowed:
                break
            admitted = min(allowed)[2]
            self._running[self._waiting.pop(admitted)] += 1
            if not admitted.done():
                admitted.set_result(None)
        self._running += Counter()  # forget tenants that have none


async def _try(ranks: WorkerGroup | None, request: Request) -> bool:
    return ranks is not None and await ranks.compile(request.sampling.grammar)
