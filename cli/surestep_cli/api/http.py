"""Access to a running server: its URL and key as settings, small HTTP calls, what it responds.

Commands need no client library for it.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import ssl
import urllib.request
from collections.abc import Iterator, Mapping
from http import HTTPStatus
from pathlib import Path
from typing import Annotated, Any, NamedTuple
from urllib.parse import unquote, urlsplit

from pydantic import BeforeValidator, Field, FilePath, SecretStr
from pydantic_settings import EnvSettingsSource, PydanticBaseSettingsSource
from surestep_common.config import ENV_PREFIX, Settings
from surestep_common.errors import InvalidRequest, Unavailable
from surestep_common.tls import context_of_client
from surestep_gateway.api_keys import read_keys


def _with_scheme(url: Any) -> Any:
    return f"http://{url}" if isinstance(url, str) and "://" not in url else url


URL = r"^(https?|unix)://"
Url = Annotated[str, BeforeValidator(_with_scheme), Field(pattern=URL)]
URL_IS = "address of the gateway; unix://PATH with %2F for / in it: a Unix socket"


class ServerUrl(Settings):
    """Settings of commands that talk to a running server.

    That is what they read from variables and files too: other names there are settings of servers.
    """

    url: Url = Field(default="http://127.0.0.1:8000", description=URL_IS)
    api_key: SecretStr | None = Field(
        default=None, description="key that the server asks for, if it does"
    )
    api_key_file: FilePath | None = Field(
        default=None, description="file whose first key that is: other users see flags, not files"
    )

    @classmethod
    def sources(
        cls, init: PydanticBaseSettingsSource, env: PydanticBaseSettingsSource
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return super().sources(init, _Address(cls, env_prefix=ENV_PREFIX))

    @classmethod
    def from_file(cls, content: Mapping[str, Any]) -> dict[str, Any]:
        return _of_clients(super().from_file(content))

    def key(self) -> SecretStr | None:
        """Return the key to send. Raise InvalidRequest."""
        return one_key(self.api_key, self.api_key_file)


class _Address(EnvSettingsSource):
    def __call__(self) -> dict[str, Any]:
        return _of_clients(super().__call__())


def _of_clients(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name in ServerUrl.model_fields}


def one_key(key: SecretStr | None, path: Path | None) -> SecretStr | None:
    """Return `key`, or the first key of the file; None without either. Raise InvalidRequest."""
    if key is not None or path is None:
        return key
    try:
        return read_keys(path)[0].key
    except ValueError as error:
        raise InvalidRequest(str(error)) from error


def no_answer(url: str, error: Exception) -> Unavailable:
    """Return what to say of a server that did not answer: one that is not there is told apart."""
    causes: list[BaseException | None] = [error, getattr(error, "reason", None), error.__cause__]
    if any(isinstance(cause, ConnectionRefusedError | FileNotFoundError) for cause in causes):
        return Unavailable(
            f"no server at {url}: start one with `surestep serve`, or name another with --url"
        )
    return Unavailable(f"no answer from {url}: {error}")


class ApiResponse(NamedTuple):
    """Status and parsed JSON body (None when it is no JSON object)."""

    status: int
    body: dict[str, Any] | None


def call(
    url: str,
    body: dict[str, Any] | None = None,
    *,
    api_key: SecretStr | None = None,
    timeout_s: float = 2.0,
    certificate: Path | None = None,
) -> ApiResponse:
    """GET, or POST with a JSON body. Every HTTP status is returned; OSError without a response.

    `certificate` is the one that the server must present, whatever name it contains; without it,
    servers are verified as usual. The URL of a Unix socket is unix://PATH/..., with %2F for / in
    its path.
    """
    tls = context_of_client(certificate) if url.startswith("https") else None
    with _opened(url, body, api_key, timeout_s, tls) as response:
        return ApiResponse(response.status, _parse(response.read()))


def read_text(url: str, *, api_key: SecretStr | None = None, timeout_s: float = 2.0) -> str:
    """Return the body of a GET. Raise OSError without a response, or for a status other than
    200.
    """
    with _opened(url, None, api_key, timeout_s) as response:
        if response.status != HTTPStatus.OK:
            raise ConnectionError(f"{urlsplit(url).path} answered with HTTP {response.status}")
        return response.read().decode(errors="replace")


def posted(
    url: str, body: dict[str, Any], *, api_key: SecretStr | None = None, timeout_s: float
) -> contextlib.AbstractContextManager[http.client.HTTPResponse]:
    """Return the response to a POST, to be read as it comes. Errors as in `call`.

    `timeout_s` limits the silence between two pieces.
    """
    return _opened(url, body, api_key, timeout_s)


@contextlib.contextmanager
def _opened(
    url: str,
    body: dict[str, Any] | None,
    api_key: SecretStr | None,
    timeout_s: float,
    tls: ssl.SSLContext | None = None,
) -> Iterator[http.client.HTTPResponse]:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data)  # noqa: S310  # the scheme is checked in the settings
    request.add_header("Content-Type", "application/json")
    if api_key:
        request.add_header("Authorization", f"Bearer {api_key.get_secret_value()}")
    handlers: list[urllib.request.BaseHandler] = [
        urllib.request.ProxyHandler({}),  # it is near
        _UnixHandler(),
        urllib.request.HTTPSHandler(context=tls),
        _EveryStatus(),
    ]
    opener = urllib.request.build_opener(*handlers)
    try:
        with opener.open(request, timeout=timeout_s) as response:
            yield response
    except http.client.HTTPException as error:  # no HTTP, or cut off
        raise ConnectionError(f"{type(error).__name__}: {error}") from error


def api_root(url: str) -> str:
    """Return the URL to which paths are added, without the /v1 of OpenAI clients' base URLs."""
    return url.rstrip("/").removesuffix("/v1")


def unix_socket(url: str) -> str | None:
    """Return the socket path of a unix:// URL; None for other URLs."""
    parts = urlsplit(url)
    return unquote(parts.netloc) if parts.scheme == "unix" else None


class _EveryStatus(urllib.request.HTTPErrorProcessor):
    """Returns responses of every status; redirections are followed."""

    def http_response(self, request: Any, response: Any) -> Any:
        return super().http_response(request, response) if response.code // 100 == 3 else response

    https_response = http_response


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


def _parse(body: bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(body)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def message_of(body: Any) -> str:
    """Return the message of an OpenAI API error, with its parameter."""
    error = body.get("error") if isinstance(body, dict) else None
    if not isinstance(error, dict):
        return str(error or body)
    param = f" ({error['param']})" if error.get("param") else ""
    return f"{error.get('message')}{param}"


def message_in(text: str) -> str:
    """Return the message of an error's body, which may be no JSON."""
    try:
        return message_of(json.loads(text))
    except ValueError:
        return text.strip()


def model_card(models: Any, name: str | None = None) -> dict[str, Any]:
    """Return the model called `name`, or the first one, of a GET /v1/models response.

    Raise InvalidRequest.
    """
    listed = models.get("data") if isinstance(models, dict) else None
    cards = [card for card in listed or () if isinstance(card, dict) and "id" in card]
    for card in cards:
        if name in (None, card["id"]):
            return card
    if name is None:
        raise InvalidRequest("no model is served")
    known = ", ".join(str(card["id"]) for card in cards)
    raise InvalidRequest(f"no model {name!r} is served: {known or 'there is none'}")
