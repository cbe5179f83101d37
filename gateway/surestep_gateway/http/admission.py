"""Admission of requests: pages and callers that may send them, and how many are open.

A page can send simple requests to any server that its browser reaches, including one that listens
on loopback, without asking that server first. No origin has access unless it is allowed: JSON is
not simple, so a body must be declared to be JSON; and a foreign name that resolves to loopback (DNS
rebinding) is not accepted as our own.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from enum import Enum, auto
from typing import NamedTuple
from urllib.parse import urlsplit

from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp
from surestep_common.access import is_loopback
from surestep_common.errors import (
    PermissionDenied,
    QueueFull,
    Unauthenticated,
    Unavailable,
    UnsupportedMediaType,
)

from surestep_gateway.api_keys import ApiClient, may_open
from surestep_gateway.settings.config import GatewaySettings

logger = logging.getLogger(__name__)

_EXPOSED = ("retry-after", "x-request-id")  # headers that scripts may read
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
    large: bool = False  # its body may have any size: it is passed on as it comes


NO_ROUTE = Rule(Access.CLIENTS, counted=False)
Handler = Callable[[Request], Awaitable[Response]]


class RuledRoute(Route):
    """A route that says how requests to it are admitted."""

    def __init__(
        self,
        path: str,
        handler: Handler,
        *,
        methods: Sequence[str],
        access: Access,
        counted: bool,
        large: bool = False,
    ) -> None:
        super().__init__(path, handler, methods=list(methods))
        self.rule = Rule(access, counted, large)


class Rules:
    """The rules of an application's routes, by the path of a request."""

    def __init__(self, routes: Sequence[BaseRoute]) -> None:
        """Raise TypeError for a route without a rule, or with another than its path has."""
        self._exact: dict[str, Rule] = {}
        self._patterns: list[RuledRoute] = []
        for route in routes:
            if not isinstance(route, RuledRoute):
                raise TypeError(f"{route} does not say how its requests are admitted")
            if route.param_convertors:
                self._patterns.append(route)
            elif self._exact.setdefault(route.path, route.rule) != route.rule:
                raise TypeError(f"{route.path} has two rules")

    def of(self, path: str) -> Rule:
        """Return the rule of a request for `path`, whatever its method."""
        if (rule := self._exact.get(path)) is not None:
            return rule
        matching = (one.rule for one in self._patterns if one.path_regex.match(path))
        return next(matching, NO_ROUTE)


class Seats:
    """The places for requests of one model."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._taken: list[str] = []  # names of the callers

    @contextlib.contextmanager
    def taken(self, caller: str) -> Iterator[None]:
        """Take a place. Raise QueueFull when there is none for this caller."""
        if not may_open(self._taken, caller, self._limit):
            raise QueueFull(
                f"more than {self._limit} requests for this model are open at this server",
                retry_after=1.0,
            )
        self._taken.append(caller)
        try:
            yield
        finally:
            self._taken.remove(caller)


class Admission:
    """Decides which callers' requests are admitted and tracks the open ones."""

    def __init__(self, settings: GatewaySettings, limit: int) -> None:
        """Admit at most `limit` requests at once, of all models together."""
        self._limit = limit
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


def with_cors(app: ASGIApp, settings: GatewaySettings) -> ASGIApp:
    """Wrap `app` so that pages of allowed origins may read its responses."""
    if not settings.allowed_origins:
        return app
    return CORSMiddleware(
        app,
        allow_origins=settings.allowed_origins,
        allow_methods=settings.allowed_methods,
        allow_headers=settings.allowed_headers,
        allow_credentials=settings.allow_credentials,
        expose_headers=_EXPOSED,
    )


class HostCheck:
    """Checks that browsers address a server on loopback by a loopback name."""

    def __init__(self, settings: GatewaySettings) -> None:
        origins = settings.allowed_origins
        # No browser reaches a Unix socket; the proxy that does has names of its own.
        on_loopback = settings.uds is None and is_loopback(settings.host)
        self._needed = on_loopback and "*" not in origins
        self._hosts = {urlsplit(origin).hostname for origin in origins}

    def check(self, headers: Mapping[bytes, bytes]) -> None:
        """Raise PermissionDenied."""
        if not self._needed or not _of_browser(headers):
            return
        host = _host(headers.get(b"host", b""))
        if host is None or not (is_loopback(host) or host in self._hosts):
            raise PermissionDenied(
                "the server listens on loopback and does not answer pages under other names; "
                "--allowed-origins makes exceptions"
            )


def _of_browser(headers: Mapping[bytes, bytes]) -> bool:
    """Return whether a browser sent this. A GET over plain HTTP names neither origin nor site."""
    named = b"origin" in headers or b"sec-fetch-site" in headers
    return named or headers.get(b"user-agent", b"").startswith(b"Mozilla/")


def _host(header: bytes) -> str | None:
    """Return the host of a Host header, without its port."""
    try:
        return urlsplit(f"//{header.decode('ascii')}").hostname
    except ValueError:  # no ASCII, or brackets that do not match
        return None


def check_json(headers: Mapping[bytes, bytes]) -> None:
    """Raise UnsupportedMediaType for a body that is not declared to be JSON, or is compressed."""
    if not has_body(headers):
        return
    kind = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
    if kind != b"application/json":
        raise UnsupportedMediaType("the Content-Type of a body must be application/json")
    coding = headers.get(b"content-encoding", b"identity").strip().lower()
    if coding != b"identity":
        name = coding[:32].decode("latin-1")
        raise UnsupportedMediaType(
            f"the Content-Encoding of a body must not be {name!r}: send it as it is"
        )


def has_body(headers: Mapping[bytes, bytes]) -> bool:
    """Return whether a request has a body, by its head."""
    return headers.get(b"content-length", b"0") != b"0" or b"transfer-encoding" in headers
