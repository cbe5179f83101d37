"""EndpointSlices of a Kubernetes Service, listed and watched: the addresses of its pods."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Collection, Iterable, Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

import httpx
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from surestep_common.config import variables
from surestep_common.errors import Unavailable

from surestep_gateway.settings.scheduler_urls import KubernetesService, member

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")  # of the pod
ANSWER_S = 10.0  # for a list, or for a watch to begin
WATCH_S = 60  # that a watch lasts
_SLACK_S = 15.0  # within which the API server ends it
_PAUSE_S = 1.0  # before the next
_PAGE, _MOST_PAGES = 250, 40  # slices, of which each has up to 1,000 addresses
_MOST_BYTES = 16 << 20  # of a page, or an event
_SERVICE_LABEL = "kubernetes.io/service-name"
_EXAMPLE = "k8s://NAMESPACE/SERVICE:PORT"


class _Lax(BaseModel):
    model_config = ConfigDict(populate_by_name=True)


class _Metadata(_Lax):
    name: str = ""
    version: str = Field("", alias="resourceVersion")
    more: str = Field("", alias="continue")


class _Conditions(_Lax):
    terminating: bool | None = None


class _Endpoint(_Lax):
    addresses: list[str] = Field(min_length=1)
    conditions: _Conditions | None = None


class _Port(_Lax):
    name: str | None = None
    port: int | None = None


class _Slice(_Lax):
    metadata: _Metadata
    kind: Literal["IPv4", "IPv6", "FQDN"] = Field(alias="addressType")
    endpoints: list[_Endpoint] | None = None
    ports: list[_Port] | None = None


class _Page(_Lax):
    metadata: _Metadata
    items: list[_Slice] | None = None


class _Bookmark(_Lax):
    metadata: _Metadata


class _Event(_Lax):
    type: str
    object: dict[str, Any]


class _Pods(NamedTuple):
    """Addresses of one slice."""

    family: str
    addresses: frozenset[str]


class _Gone(Exception):
    """The version to go on from is too old, and all has to be listed again."""


async def follow_slices(service: KubernetesService) -> AsyncIterator[Collection[str]]:
    """Yield the addresses of all pods of a Service that do not end, at first and with each change.

    Whether one is ready does not matter: that is seen at the scheduler itself, and sooner. Ends
    when all has to be listed again. Raise Unavailable.
    """
    with _told_as_unavailable(), contextlib.suppress(_Gone):
        async with _client(service) as client:
            slices, version = await _list(client, service)
            yield _of_one_family(slices.values())
            while True:
                async with contextlib.aclosing(_watch(client, service, version)) as events:
                    async for event in events:
                        version = _apply(service, slices, event)
                        yield _of_one_family(slices.values())
                await asyncio.sleep(_PAUSE_S)


@contextlib.contextmanager
def _told_as_unavailable() -> Iterator[None]:
    try:
        yield
    except (httpx.HTTPError, httpx.InvalidURL, TimeoutError) as error:
        what = str(error) or type(error).__name__
        raise Unavailable(f"the Kubernetes API does not answer: {what}") from error
    except OSError as error:
        raise Unavailable(f"cannot read {ACCOUNT}: {error.strerror}") from error
    except ValidationError as error:
        raise Unavailable("the Kubernetes API says what no EndpointSlice is") from error
    except UnicodeError as error:
        raise Unavailable(f"the token in {ACCOUNT} is no text") from error


def _client(service: KubernetesService) -> httpx.AsyncClient:
    """Return a client of the API server, as pods are told of it. Raise OSError."""
    known = variables("KUBERNETES_SERVICE_")
    host, port = known["KUBERNETES_SERVICE_HOST"], known.get("KUBERNETES_SERVICE_PORT", "443")
    host = f"[{host}]" if ":" in host else host
    return httpx.AsyncClient(
        base_url=f"https://{host}:{port}/apis/discovery.k8s.io/v1/namespaces/{service.namespace}",
        auth=_with_token,
        verify=ssl.create_default_context(cafile=ACCOUNT / "ca.crt"),
        limits=httpx.Limits(max_keepalive_connections=0),  # one that was closed is no trouble
        trust_env=False,
        timeout=ANSWER_S,
    )


def _with_token(request: httpx.Request) -> httpx.Request:
    """Add the service account's token, which is another one every hour."""
    token = (ACCOUNT / "token").read_text().strip()
    request.headers["authorization"] = f"Bearer {token}"
    return request


async def _list(
    client: httpx.AsyncClient, service: KubernetesService
) -> tuple[dict[str, _Pods], str]:
    """Return the pods of all slices by name, and the version to watch from."""
    slices: dict[str, _Pods] = {}
    more: dict[str, str] = {}
    for _ in range(_MOST_PAGES):
        async with asyncio.timeout(ANSWER_S):
            page = await _page(client, service, {"limit": str(_PAGE), **more})
        slices |= {one.metadata.name: _pods(service, one) for one in page.items or ()}
        if not page.metadata.more:
            return slices, page.metadata.version
        more = {"continue": page.metadata.more}
    raise Unavailable(f"the Service has more than {_PAGE * _MOST_PAGES} EndpointSlices")


async def _page(
    client: httpx.AsyncClient, service: KubernetesService, params: dict[str, str]
) -> _Page:
    body = b""
    async for line in _ask(client, service, params):
        body += line
        _check_size(body)
    return _Page.model_validate_json(body)


async def _watch(
    client: httpx.AsyncClient, service: KubernetesService, version: str
) -> AsyncGenerator[_Event, None]:
    """Yield what has changed since a version, until the API server ends the watch."""
    how = {"resourceVersion": version, "timeoutSeconds": str(WATCH_S)}
    asked = _ask(client, service, {"watch": "1", "allowWatchBookmarks": "true", **how})
    async with contextlib.aclosing(asked) as lines:
        async for line in lines:
            yield _Event.model_validate_json(line)


async def _ask(
    client: httpx.AsyncClient, service: KubernetesService, params: dict[str, str]
) -> AsyncGenerator[bytes, None]:
    """Yield the lines of an answer. Raise Unavailable, or _Gone."""
    params |= {"labelSelector": f"{_SERVICE_LABEL}={service.service}"}
    silence = httpx.Timeout(ANSWER_S, read=WATCH_S + _SLACK_S if "watch" in params else ANSWER_S)
    async with client.stream("GET", "/endpointslices", params=params, timeout=silence) as response:
        _check(response, service)
        line = b""
        async for piece in response.aiter_bytes():
            *whole, line = (line + piece).split(b"\n")
            for one in whole:
                yield one
            _check_size(line)
        if line:
            yield line


def _check_size(text: bytes) -> None:
    if len(text) > _MOST_BYTES:
        raise Unavailable(f"the Kubernetes API says more than {_MOST_BYTES} bytes at a time")


def _check(response: httpx.Response, service: KubernetesService) -> None:
    match response.status_code:
        case httpx.codes.OK:
            return
        case httpx.codes.GONE:
            raise _Gone
        case httpx.codes.FORBIDDEN:
            raise Unavailable(
                "the pod's service account may not list and watch endpointslices of "
                f"discovery.k8s.io in {service.namespace}"
            )
        case other:
            raise Unavailable(f"the Kubernetes API says {other}")


def _apply(service: KubernetesService, slices: dict[str, _Pods], event: _Event) -> str:
    """Change the slices as an event says; return its version. Raise Unavailable, or _Gone."""
    match event.type:
        case "ERROR":
            if event.object.get("code") == httpx.codes.GONE:
                raise _Gone
            raise Unavailable(f"the watch fails: {str(event.object.get('message'))[:200]}")
        case "BOOKMARK":
            return _Bookmark.model_validate(event.object).metadata.version
        case kind:
            one = _Slice.model_validate(event.object)
            slices.pop(one.metadata.name, None)
            if kind != "DELETED":
                slices[one.metadata.name] = _pods(service, one)
            return one.metadata.version


def _pods(service: KubernetesService, one: _Slice) -> _Pods:
    """Return the addresses of a slice. Raise Unavailable where the port is not to be told."""
    hosts = [
        endpoint.addresses[0]  # the others are without meaning
        for endpoint in one.endpoints or ()
        if endpoint.conditions is None or not endpoint.conditions.terminating
    ]
    form = "[{}]:{}" if one.kind == "IPv6" else "{}:{}"
    found = [form.format(host, _port(service, one)) for host in hosts]
    try:
        return _Pods(one.kind, frozenset(map(member, found)))
    except ValueError as error:
        raise Unavailable(f"an EndpointSlice has {error}") from None


def _port(service: KubernetesService, one: _Slice) -> int:
    if service.port.isdecimal():
        return int(service.port)
    fitting = [p.port for p in one.ports or () if p.port and service.port in ("", p.name)]
    if len(fitting) != 1:
        raise Unavailable(f"{len(fitting)} ports of the Service fit: name one, {_EXAMPLE}")
    return fitting[0]


def _of_one_family(slices: Iterable[_Pods]) -> Collection[str]:
    """Return the addresses of IPv4, or those of another family where there are none: pods may have
    both.
    """
    found: dict[str, set[str]] = {"IPv4": set(), "IPv6": set(), "FQDN": set()}
    for one in slices:
        found[one.family] |= one.addresses
    return next(filter(None, found.values()), set())
