"""Who may come in, what is open, and how it ends when the gateway stops."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
from collections.abc import Iterator, Sequence

from surestep_common.errors import QueueFull, Unauthenticated, Unavailable

from .config import GatewaySettings
from .tenants import may_open

logger = logging.getLogger(__name__)

GENERATING = frozenset({"/v1/chat/completions", "/v1/completions"})
_WITH_KEY = ("/v1/", "/tokenize", "/detokenize")
_ABORT_S = 2.0  # for error events to reach their clients


def bearer_matches(header: bytes, keys: Sequence[bytes]) -> bool:
    """Whether an Authorization header carries one of the keys; takes as long for any wrong key."""
    scheme, _, given = header.partition(b" ")
    matches = [hmac.compare_digest(given.strip(), key) for key in keys]
    return scheme.lower() == b"bearer" and any(matches)


class Admission:
    """Which requests may come in, and which are open."""

    def __init__(self, settings: GatewaySettings) -> None:
        self._limit = settings.max_concurrent_requests
        self._drain_s = settings.drain_timeout_s
        self._keys = [key.encode() for key in settings.api_key]
        self._open: dict[asyncio.Task[object], str] = {}  # and who called
        self.draining = False
        self.aborting = False

    @property
    def num_open(self) -> int:
        """Generation requests that are open."""
        return len(self._open)

    def check(self, path: str, headers: dict[bytes, bytes], caller: str = "") -> None:
        """Raises Unauthenticated, Unavailable or QueueFull."""
        if self._keys and path.startswith(_WITH_KEY):
            self._check_key(headers.get(b"authorization", b""))
        if path not in GENERATING:
            return
        if self.draining:
            raise Unavailable("the server is shutting down", retry_after=self._drain_s)
        if not may_open(self._open.values(), caller, self._limit):
            raise QueueFull(
                f"more than {self._limit} requests are open at this server", retry_after=1.0
            )

    def _check_key(self, header: bytes) -> None:
        if not bearer_matches(header, self._keys):
            raise Unauthenticated("missing or wrong API key")

    @contextlib.contextmanager
    def opened(self, caller: str = "") -> Iterator[None]:
        """Count the generation request that the current task serves."""
        task = asyncio.current_task()
        assert task is not None
        self._open[task] = caller
        try:
            yield
        finally:
            self._open.pop(task, None)

    async def drain(self) -> None:
        """Admit nothing more; give open requests their time, then end them with an error."""
        self.draining = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._drain_s):
                await self._wait_until_idle()
                return
        logger.warning("ending %d requests that did not finish in time", self.num_open)
        self.aborting = True
        for task in self._open:
            task.cancel()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_ABORT_S):
                await self._wait_until_idle()

    async def _wait_until_idle(self) -> None:
        while self._open:
            await asyncio.wait(self._open)
            await asyncio.sleep(0)
