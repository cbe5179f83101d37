"""Owners of what caches hold: nothing that one owner sent is found, or found sooner, by another.

The owner of a request is the owner of its API key, or the key of a gRPC client. All requests that
need no key have one owner, the empty one.
"""

from __future__ import annotations

from hashlib import blake2b


def cache_root(owner: str, salt: str) -> bytes:
    """Return what the keys of all prefixes of an owner begin with, where requests have this salt.

    The owner's length goes first, so that no salt makes one owner's root another's.
    """
    name = owner.encode()
    return blake2b(len(name).to_bytes(8) + name + salt.encode(), digest_size=16).digest()
