"""Addresses of schedulers as --scheduler-url takes them, and places that keep lists of them."""

from __future__ import annotations

import contextlib
import importlib.util
import ipaddress
import re
from pathlib import Path
from typing import NamedTuple, TypeAlias
from urllib.parse import SplitResult, unquote, urlsplit

from surestep_common import addresses
from surestep_common.config import variables

_HOST = re.compile(r"(?=.{1,253}$)[a-z0-9_-]{1,63}(\.[a-z0-9_-]{1,63})*\.?")
_LABEL = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")  # names of Kubernetes
_API_SERVER = "KUBERNETES_SERVICE_HOST"
_DNS_PORT = 53
_FORMS = {
    "dns": "dns://NAME:PORT, or dns://IP/NAME:PORT with the address of a name server",
    "dns+srv": "dns+srv://NAME, or dns+srv://IP/NAME with the address of a name server",
    "file": "file:///PATH",
    "k8s": "k8s://NAMESPACE/SERVICE or k8s://NAMESPACE/SERVICE:PORT",
}


class DnsName(NamedTuple):
    """Place dns://NAME:PORT; without a port dns+srv://NAME, whose records name host and port."""

    name: str
    port: int | None
    server: tuple[str, int] | None  # IP address and port; None = those of the system


class AddressFile(NamedTuple):
    """Place file:///PATH, with an address a line."""

    path: Path


class KubernetesService(NamedTuple):
    """Place k8s://NAMESPACE/SERVICE:PORT, whose EndpointSlices name the pods."""

    namespace: str
    service: str
    port: str  # name or number; empty = the only one


Place: TypeAlias = DnsName | AddressFile | KubernetesService


def place(url: str) -> Place | None:
    """Return where a list of addresses is kept; None for an address itself. Raise ValueError."""
    parts = urlsplit(url)
    if parts.scheme not in _FORMS:
        return None
    try:
        if parts.query or parts.fragment or parts.username is not None:
            raise ValueError(url)
        match parts.scheme:
            case "file":
                return _file(parts)
            case "k8s":
                return _kubernetes(parts)
            case _:
                return _dns(parts)
    except ValueError:
        raise ValueError(f"must be {_FORMS[parts.scheme]}") from None


def check(url: str) -> str:
    """Return an address as gRPC is to have it, or a place that can be asked. Raise ValueError."""
    found = place(url)
    if found is None:
        return addresses.check(url)
    if isinstance(found, DnsName) and importlib.util.find_spec("dns") is None:
        raise ValueError("needs dnspython: pip install 'surestep[dns]'")
    if isinstance(found, KubernetesService) and not variables(_API_SERVER):
        raise ValueError(f"k8s:// is for pods of Kubernetes, which have {_API_SERVER}")
    return url


def member(text: str) -> str:
    """Return an address of a list as gRPC is to have it. Raise ValueError."""
    with contextlib.suppress(ValueError):
        found = addresses.check(text)
        host, port = addresses.split(found)
        if text.isprintable() and " " not in text and (port in range(1, 65536) or host[0] == "/"):
            return found
    raise ValueError(f"no address: {text[:80]!r}")


def _dns(parts: SplitResult) -> DnsName:
    behind = parts.path.strip("/")
    server = None
    if behind and parts.netloc:
        server = str(ipaddress.ip_address(parts.hostname or "")), parts.port or _DNS_PORT
    named = urlsplit(f"//{behind}") if behind else parts
    name, port = named.hostname or "", named.port
    if not _HOST.fullmatch(name) or named.path.strip("/") or port == 0:
        raise ValueError(name)
    if (port is None) == (parts.scheme == "dns"):
        raise ValueError(port)
    return DnsName(name, port, server)


def _file(parts: SplitResult) -> AddressFile:
    path = Path(unquote(parts.path))
    if parts.netloc or not path.name or "\0" in str(path):
        raise ValueError(path)
    return AddressFile(path)


def _kubernetes(parts: SplitResult) -> KubernetesService:
    service, colon, port = parts.path.removeprefix("/").partition(":")
    wrong = [one for one in (parts.netloc, service) if not _LABEL.fullmatch(one)]
    if wrong or (colon and not _LABEL.fullmatch(port)):
        raise ValueError(wrong)
    return KubernetesService(parts.netloc, service, port)
