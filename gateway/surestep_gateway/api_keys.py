"""API keys, the rights of each key's owner, and the tenant that a request counts for.

With API keys, the owner of the key is the tenant and nothing in the request changes that, unless a
trusted gateway names the flow that it belongs to. Without keys, the `user` field separates tenants,
or else their address; clients are trusted with it.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from hashlib import blake2b
from ipaddress import ip_address, ip_network
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import SecretStr
from surestep_common.access import bearer_index
from surestep_common.errors import PermissionDenied
from surestep_common.tenants import may_enter


class Tenant(NamedTuple):
    """A tenant as the schedulers see it."""

    name: str
    weight: float = 1.0
    cache_owner: str = ""  # whose prefixes its requests find; see surestep_common.tenants


ANYBODY = Tenant("")


class Caller(NamedTuple):
    """The sender of a request, as known before its body is read."""

    client: ApiClient | None  # the owner of its key, where there are keys
    address: str
    flow: str = ""  # that a trusted gateway names: fairness is between flows
    session: str = ""  # likewise: its requests go to one scheduler

    @classmethod
    def of(cls, scope: Any) -> Caller:
        """Return the caller of an ASGI scope."""
        host, _ = scope.get("client") or ("", 0)
        state = scope.get("state", {})
        return cls(state.get("client"), host, *state.get("named", ()))

    @property
    def name(self) -> str:
        """Equal for all connections of one caller."""
        key = f"key {self.client.name}" if self.client is not None else f"address {self.address}"
        return f"flow {self.flow} of {key}" if self.flow else key

    def tenant(self, user: str | None) -> Tenant:
        """Return the tenant of a request whose body has this `user`."""
        if self.client is not None:
            owner = _opaque(self._replace(flow="").name)
            weight, shares = self.client.weight, self.client.shares_prefixes
            return Tenant(_opaque(self.name), weight, "" if shares else owner)
        return Tenant(_opaque(f"user {user}" if user and not self.flow else self.name))

    def check_priority(self, priority: int | None) -> None:
        """Raise PermissionDenied where the key does not allow a priority."""
        if priority and self.client is not None and not self.client.may_prioritise:
            raise PermissionDenied("this key's requests may not set a priority", param="priority")

    def may_name(self, adapter: str) -> bool:
        """Return whether its requests may have an adapter."""
        allowed = self.client.adapters if self.client is not None else None
        return allowed is None or adapter in allowed


_FLOWS = (b"x-llm-d-inference-fairness-id", b"x-gateway-inference-fairness-id")
_SESSION = b"x-session-id"
_MOST_NAMED = 256  # bytes of a name


class TrustedGateways:
    """The gateways that may name the flow and the session of a request, by their addresses."""

    def __init__(self, networks: Iterable[str]) -> None:
        """Raise ValueError for what is no address and no network."""
        self._networks = [ip_network(network, strict=False) for network in networks]

    def named(self, address: str, headers: Mapping[bytes, bytes]) -> tuple[str, str]:
        """Return flow and session, as far as the headers of a request from there name them."""
        if not self._networks or not self._trusts(address):
            return "", ""
        flow = next(filter(None, (headers.get(name) for name in _FLOWS)), b"")
        session = headers.get(_SESSION, b"")
        return _name_in(flow), _name_in(session)

    def _trusts(self, address: str) -> bool:
        try:
            peer = ip_address(address)
        except ValueError:  # a Unix socket
            return False
        return any(peer in network for network in self._networks)


def _name_in(header: bytes) -> str:
    return header[:_MOST_NAMED].decode("latin-1")


def _opaque(name: str) -> str:
    """Return a name of fixed length that does not identify a person."""
    return blake2b(name.encode(), digest_size=16).hexdigest()


def may_open(open_by: Collection[str], caller: str, limit: int) -> bool:
    """Return whether a caller may open one more request; `open_by` has the callers of open ones.

    At the limit, every caller can still open up to a fair share of it.
    """
    if len(open_by) < limit:  # nearly always, and then no count is needed
        return True
    mine = sum(name == caller for name in open_by)
    return may_enter(mine, 1, len(open_by), limit, limit / len({*open_by, caller}))


_ANSWERS = {"yes": True, "no": False}


class ApiClient(NamedTuple):
    """The owner of a key, as far as requests of different owners are treated differently."""

    name: str  # never the key
    weight: float = 1.0  # its share of a busy server, compared with others
    may_prioritise: bool = True
    shares_prefixes: bool = False  # with the owners of other keys
    adapters: Collection[str] | None = None  # that it may name; None: all


class ApiKey(NamedTuple):
    key: SecretStr
    client: ApiClient


class ApiKeys:
    """The keys that a server accepts; without any key it accepts every request."""

    def __init__(self, keys: Sequence[ApiKey], *, share_prefixes: bool = False) -> None:
        self._keys = [key.key.get_secret_value().encode() for key in keys]
        self._clients = [key.client._replace(shares_prefixes=share_prefixes) for key in keys]

    def __bool__(self) -> bool:
        """Return whether a key is needed."""
        return bool(self._keys)

    def client(self, header: bytes) -> ApiClient | None:
        """Return the owner of the key in an Authorization header, None for an unknown key.

        A client that sets no headers has the key as the password of its URL: Basic authorization.
        """
        index = bearer_index(_as_bearer(header), self._keys)
        return None if index is None else self._clients[index]


def _as_bearer(header: bytes) -> bytes:
    """Return a header with Basic authorization (RFC 7617) as one that carries its password."""
    scheme, _, given = header.partition(b" ")
    if scheme.lower() != b"basic":
        return header
    try:
        _, _, password = base64.b64decode(given.strip(), validate=True).partition(b":")
    except ValueError:
        return b""
    return b"Bearer " + password


def plain_keys(keys: Sequence[SecretStr]) -> list[ApiKey]:
    """Return keys without owner details, which are all treated alike."""
    return [ApiKey(key, ApiClient(_name(key.get_secret_value()))) for key in keys]


def read_keys(path: Path) -> list[ApiKey]:
    """Read one key per line, optionally followed by `name=`, `weight=`, `priority=yes|no` and
    `adapters=`, the names of the only adapters that its requests may name.

    The default priority is no. Empty lines and lines that begin with # do not count. Raise
    ValueError naming the line, never the key.
    """
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read {path}: {error}") from error
    keys = list(_parse(path, lines))
    if not keys:
        raise ValueError(f"{path} holds no key")
    return keys


def _parse(path: Path, lines: Sequence[str]) -> Iterator[ApiKey]:
    for number, line in enumerate(lines, start=1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        try:
            yield _api_key(*words)
        except (ValueError, TypeError, KeyError) as error:
            expected = "KEY [name=NAME] [weight=NUMBER] [priority=yes|no] [adapters=NAME,NAME]"
            raise ValueError(f"{path}, line {number}: expected {expected}") from error


def _api_key(key: str, *options: str) -> ApiKey:
    given = dict(option.split("=") for option in options)
    name, weight = given.pop("name", _name(key)), float(given.pop("weight", 1))
    may_prioritise = _ANSWERS[given.pop("priority", "no")]
    listed = given.pop("adapters", None)
    adapters = None if listed is None else frozenset(filter(None, listed.split(",")))
    if given or not name or not 0.01 <= weight <= 100:
        raise ValueError
    client = ApiClient(name, weight, may_prioritise, adapters=adapters)
    return ApiKey(SecretStr(key), client)


def _name(key: str) -> str:
    """Return a name that distinguishes keys in logs without revealing them."""
    return f"key-{hashlib.blake2b(key.encode(), digest_size=4).hexdigest()}"
