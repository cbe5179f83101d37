"""Whose a request is, for the sake of fairness: of a key, of a user, or of an address.

Where there are keys their owners are told apart, and nothing that a request says of itself counts.
Without keys clients are as honest as they are: `user` tells them apart, or else their address.
"""

from __future__ import annotations

from collections.abc import Collection
from hashlib import blake2b
from typing import Any, NamedTuple

from surestep_common.errors import PermissionDenied
from surestep_common.fair_bound import may_enter

from .api_keys import ApiClient


class Tenant(NamedTuple):
    """As the schedulers hear of it."""

    name: str
    weight: float = 1.0


ANYBODY = Tenant("")


class Caller(NamedTuple):
    """What is known of who calls, before the body is read."""

    client: ApiClient | None  # the owner of its key, where there are keys
    address: str

    @classmethod
    def of(cls, scope: Any) -> Caller:
        """Of an ASGI scope."""
        host, _ = scope.get("client") or ("", 0)
        return cls(scope.get("state", {}).get("client"), host)

    @property
    def name(self) -> str:
        """Equal for the connections of one caller."""
        return f"key {self.client.name}" if self.client is not None else f"address {self.address}"

    def tenant(self, user: str | None) -> Tenant:
        """Of a request whose body names this user."""
        if self.client is not None:
            return Tenant(_opaque(self.name), self.client.weight)
        return Tenant(_opaque(f"user {user}" if user else self.name))

    def check_priority(self, priority: int | None) -> None:
        """Raises PermissionDenied where the key does not allow one."""
        if priority and self.client is not None and not self.client.may_prioritise:
            raise PermissionDenied("this key's requests may not set a priority", param="priority")


def _opaque(name: str) -> str:
    """Of one length, and nothing that identifies a person."""
    return blake2b(name.encode(), digest_size=16).hexdigest()


def may_open(open_by: Collection[str], caller: str, limit: int) -> bool:
    """Whether a caller may open one more request; `open_by` names the callers of those open.

    Where the limit is reached, a fair share of it is still there for everybody.
    """
    if len(open_by) < limit:  # as nearly always: nobody's need be counted
        return True
    mine = sum(name == caller for name in open_by)
    return may_enter(mine, 1, len(open_by), limit, limit / len({*open_by, caller}))
