"""Protection against requests of web pages: an origin has no access unless it is allowed.

A page can send simple requests to any server that its browser reaches, including one that listens
on loopback, without asking that server first. JSON is not simple, so a body must be declared to be
JSON; and a foreign name that resolves to loopback (DNS rebinding) is not accepted as our own.
"""

from __future__ import annotations

from collections.abc import Mapping
from urllib.parse import urlsplit

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp
from surestep_common.access import is_loopback
from surestep_common.errors import PermissionDenied, UnsupportedMediaType

from surestep_gateway.settings.config import GatewaySettings

_EXPOSED = ("retry-after", "x-request-id")  # headers that scripts may read


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
