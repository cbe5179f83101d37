"""Prefix-aware routing: the scheduler that has seen a prefix, unless it is overloaded.

Rendezvous hashing (Thaler and Ravishankar, "Using name-based mappings to increase hit rates",
1998): every scheduler has a rank for every prefix, and one that goes away moves only its own.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from typing import NamedTuple

_PREFIX_TOKENS = 256  # system prompts differ by then
_SLACK = 4  # requests, and
_FACTOR = 1.5  # times the least load: what a prefix cache hit is worth


class RoutingCandidate(NamedTuple):
    """A scheduler that would accept the request."""

    address: str
    load: int  # requests that it works on or has waiting


def prefix_key(root: bytes, prompt_ids: Sequence[int]) -> bytes:
    """Return a key, equal for requests that may share the start of their prompts in a prefix
    cache. They have one `root`, see cache_root.
    """
    prefix = array("I", prompt_ids[:_PREFIX_TOKENS]).tobytes()
    return hashlib.blake2b(prefix, key=root, digest_size=16).digest()


def choose(key: bytes, candidates: Sequence[RoutingCandidate]) -> int:
    """Return the index of the candidate for a prefix; there must be one."""
    ranked = sorted(range(len(candidates)), key=lambda i: _rank(key, candidates[i]), reverse=True)
    least = min(ranked, key=lambda i: candidates[i].load)
    limit = _SLACK + _FACTOR * candidates[least].load
    return ranked[0] if candidates[ranked[0]].load <= limit else least


def _rank(key: bytes, candidate: RoutingCandidate) -> bytes:
    return hashlib.blake2b(candidate.address.encode(), key=key, digest_size=8).digest()
