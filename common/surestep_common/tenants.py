"""Rules that keep tenants apart: none finds what another has cached, none takes all of a bound.

The owner of cached prefixes is the owner of a request's API key, or the key of a gRPC client. All
requests that need no key have one owner, the empty one.
"""

from __future__ import annotations

from hashlib import blake2b

_OVERFULL = 2  # times the bound that there may be, for clients below their share of it


def cache_root(owner: str, salt: str, adapter: str = "") -> bytes:
    """Return what the keys of all prefixes of an owner begin with, where requests have this salt
    and the adapter with this digest.

    The lengths of what goes first are part of it, so that no salt makes one root another's.
    """
    names = (len(name).to_bytes(8) + name for name in (owner.encode(), adapter.encode()))
    return blake2b(b"".join(names) + salt.encode(), digest_size=16).digest()


def told_salt(owner: str, salt: str) -> str:
    """Return what routers are told of whose prefix it is: they know salts, and not owners.

    They match an owner's prefixes with no request, unless all requests have one owner.
    """
    return cache_root(owner, salt).hex() if owner else salt


def may_enter(held: float, more: float, total: float, bound: float, share: float) -> bool:
    """Return whether a client that has `held` of `total` may have `more` under this bound.

    Where the bound is reached, `share` of it is still there for this client; and one request,
    whatever its size, for a client that has nothing. All five are counts of the same things.
    """
    if total + more <= bound:
        return True
    return total + more <= _OVERFULL * bound and (not held or held + more <= share)
