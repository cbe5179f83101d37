"""Small HTTP calls, so that the commands need no client library."""

from __future__ import annotations

import http.client
import json
import socket
import ssl
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit


class Answer(NamedTuple):
    """Status and parsed JSON body (None when it is no JSON object)."""

    status: int
    body: dict[str, Any] | None


def call(
    url: str,
    body: dict[str, Any] | None = None,
    *,
    api_key: str | None = None,
    timeout_s: float = 2.0,
    certificate: Path | None = None,
    verify: bool = True,
) -> Answer:
    """GET, or POST with a JSON body. Every HTTP status is an answer; OSError when there is none.

    `certificate` is the one that the server must show, whatever the name in it; without it, servers
    are judged as usual. Without `verify`, whoever answers will do. A Unix socket is called
    unix://PATH/..., with %2F for / in its path.
    """
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data)  # noqa: S310  # the scheme is checked in the settings
    request.add_header("Content-Type", "application/json")
    if api_key:
        request.add_header("Authorization", f"Bearer {api_key}")
    handlers: list[urllib.request.BaseHandler] = [
        urllib.request.ProxyHandler({}),  # it is near
        _UnixHandler(),
    ]
    if url.startswith("https"):
        handlers.append(
            urllib.request.HTTPSHandler(context=tls_context(certificate, verify=verify))
        )
    opener = urllib.request.build_opener(*handlers)
    try:
        return _open(opener, request, timeout_s)
    except http.client.HTTPException as error:  # no HTTP, or cut off
        raise ConnectionError(f"{type(error).__name__}: {error}") from error


def _open(
    opener: urllib.request.OpenerDirector, request: urllib.request.Request, timeout_s: float
) -> Answer:
    try:
        with opener.open(request, timeout=timeout_s) as response:
            return Answer(response.status, _parse(response.read()))
    except urllib.error.HTTPError as error:
        with error:
            return Answer(error.code, _parse(error.read()))


def api_root(url: str) -> str:
    """What paths are added to; clients of OpenAI's API have a /v1 at the end of their URLs."""
    return url.rstrip("/").removesuffix("/v1")


def unix_socket(url: str) -> str | None:
    """The path of the socket that a unix:// URL names; None for other URLs."""
    parts = urlsplit(url)
    return unquote(parts.netloc) if parts.scheme == "unix" else None


class _UnixHandler(urllib.request.AbstractHTTPHandler):
    """Opens unix://PATH/...; urllib.request finds the two methods by their names."""

    def unix_request(self, request: urllib.request.Request) -> urllib.request.Request:
        request.add_unredirected_header("Host", "localhost")
        return self.do_request_(request)

    def unix_open(self, request: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(_UnixConnection, request)


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str, **options: Any) -> None:
        super().__init__("localhost", **options)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


def tls_context(certificate: Path | None, *, verify: bool = True) -> ssl.SSLContext:
    """For connections to a server, which is judged as `call` says."""
    context = ssl.create_default_context(cafile=certificate)
    if not verify:
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    elif certificate is not None:
        context.check_hostname = False
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # this one, whoever signed it
    return context


def _parse(body: bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(body)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None
