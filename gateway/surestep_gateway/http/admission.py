"""Admission of requests, the count of open ones, and draining when the gateway stops."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
from collections.abc import Iterator, Mapping
from enum import Enum, auto
from typing import NamedTuple

from surestep_common.errors import QueueFull, Unauthenticated, Unavailable

from surestep_gateway.auth.api_keys import ApiClient, may_open
from surestep_gateway.settings.config import GatewaySettings

logger = logging.getLogger(__name__)

_ABORT_S = 2.0  # for error events to reach their clients


class Access(Enum):
    """The callers that a route answers."""

    PROBES = auto()  # everybody, without a client certificate too
    EVERYBODY = auto()
    METRICS = auto()  # everybody, or as OPERATORS with --protect-metrics
    OPERATORS = auto()  # clients, and those with the admin key
    CLIENTS = auto()  # those with an API key, where the server has any
    ADMINISTRATORS = auto()  # the route itself asks for the admin key


class Rule(NamedTuple):
    """The way requests to a route are admitted."""

    access: Access
    # Read whole, bounded in number, refused while the server drains, traced, and the end counted.
    counted: bool


NO_ROUTE = Rule(Access.CLIENTS, counted=False)


class Admission:
    """Decides which requests are admitted and tracks the open ones."""

    def __init__(self, settings: GatewaySettings) -> None:
        self._limit = settings.max_concurrent_requests
        self._delay_s = settings.shutdown_delay_s
        self._drain_s = settings.drain_timeout_s
        self._keys, self._admin_keys = settings.api_keys(), settings.admin_keys()
        self._protect_metrics = settings.protect_metrics
        self._needs_certificate = settings.ssl_cert_reqs == ssl.CERT_REQUIRED
        self._open: dict[asyncio.Task[object], str] = {}  # by task; the names of the callers
        self.leaving = False  # stopping: clients should go elsewhere
        self.draining = False
        self.aborting = False

    @property
    def num_open(self) -> int:
        return len(self._open)

    def check(self, rule: Rule, caller: str) -> None:
        """Raise Unavailable while draining, QueueFull when no further request fits."""
        if not rule.counted:
            return
        if self.draining:
            raise Unavailable("the server is shutting down", retry_after=self._drain_s)
        if not may_open(self._open.values(), caller, self._limit):
            raise QueueFull(
                f"more than {self._limit} requests are open at this server", retry_after=1.0
            )

    def check_certificate(self, rule: Rule, *, certified: bool) -> None:
        """Raise Unauthenticated when a required client certificate is missing."""
        if self._needs_certificate and not certified and rule.access is not Access.PROBES:
            raise Unauthenticated("a client certificate is needed")

    def identify(self, rule: Rule, headers: Mapping[bytes, bytes]) -> ApiClient | None:
        """Return the owner of the request's key, None where no key is needed.

        Raise Unauthenticated.
        """
        if rule.access in (Access.PROBES, Access.EVERYBODY, Access.ADMINISTRATORS):
            return None
        if rule.access is Access.METRICS and not self._protect_metrics:
            return None
        operators = rule.access is not Access.CLIENTS and bool(self._admin_keys)
        if not (self._keys or operators):
            return None
        header = _key_in(headers)
        client = self._keys.client(header)
        if client is None and operators:
            client = self._admin_keys.client(header)
        if client is None:
            raise Unauthenticated("missing or wrong API key")
        return client

    @contextlib.contextmanager
    def opened(self, caller: str) -> Iterator[None]:
        """Count the request that the current task serves under its caller's name."""
        task = asyncio.current_task()
        assert task is not None
        self._open[task] = caller
        try:
            yield
        finally:
            self._open.pop(task, None)

    async def leave(self) -> None:
        """Continue to serve while load balancers notice that this server is leaving."""
        self.leaving = True
        await asyncio.sleep(self._delay_s)

    async def drain(self) -> None:
        """Admit no more requests, wait for the open ones, then end the rest with an error."""
        self.leaving = self.draining = True
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


def _key_in(headers: Mapping[bytes, bytes]) -> bytes:
    """Return the Authorization header, or what it would be: Anthropic's clients send x-api-key."""
    given = headers.get(b"authorization")
    if given is None and b"x-api-key" in headers:
        given = b"Bearer " + headers[b"x-api-key"]
    return given or b""
