"""The tenant that a request counts for in fair scheduling: a key, a user or an address.

With API keys, the owner of the key is the tenant and nothing in the request changes that. Without
keys, the `user` field separates tenants, or else their address; clients are trusted with it.
"""

from __future__ import annotations

from collections.abc import Collection
from hashlib import blake2b
from typing import Any, NamedTuple

from surestep_common.errors import PermissionDenied
from surestep_common.fair_bound import may_enter

from .api_keys import ApiClient


class Tenant(NamedTuple):
    """A tenant as the schedulers see it."""

    name: str
    weight: float = 1.0
    cache_owner: str = ""  # whose prefixes its requests find; see surestep_common.cache_owner


ANYBODY = Tenant("")


class Caller(NamedTuple):
    """The sender of a request, as known before its body is read."""

    client: ApiClient | None  # the owner of its key, where there are keys
    address: str

    @classmethod
    def of(cls, scope: Any) -> Caller:
        """Return the caller of an ASGI scope."""
        host, _ = scope.get("client") or ("", 0)
        return cls(scope.get("state", {}).get("client"), host)

    @property
    def name(self) -> str:
        """Equal for all connections of one caller."""
        return f"key {self.client.name}" if self.client is not None else f"address {self.address}"

    def tenant(self, user: str | None) -> Tenant:
        """Return the tenant of a request whose body has this `user`."""
        if self.client is not None:
            name = _opaque(self.name)
            return Tenant(name, self.client.weight, "" if self.client.shares_prefixes else name)
        return Tenant(_opaque(f"user {user}" if user else self.name))

    def check_priority(self, priority: int | None) -> None:
        """Raise PermissionDenied where the key does not allow a priority."""
        if priority and self.client is not None and not self.client.may_prioritise:
            raise PermissionDenied("this key's requests may not set a priority", param="priority")


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
