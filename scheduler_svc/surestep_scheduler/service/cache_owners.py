"""Owners of requests, as far as caches are concerned: see surestep_common.cache_owner."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

from surestep_common.access import shown_key
from surestep_common.errors import InvalidRequest
from surestep_proto import scheduler_pb2


class CacheOwners:
    """The owners of requests: clients by their gRPC keys, others as the gateway says."""

    def __init__(self, keys: Sequence[str], *, shared: bool) -> None:
        """`keys` of gRPC clients; `shared`: all requests have one owner."""
        self._keys = [key.encode() for key in keys]
        self._names = [f"grpc {blake2b(key, digest_size=16).hexdigest()}" for key in self._keys]
        self._shared = shared

    def settle(self, request: scheduler_pb2.GenerateRequest, metadata: Any) -> None:
        """Write the owner into a request that came with this metadata, and into its grammar.

        Raises InvalidRequest where a client with a key of its own names another owner.
        """
        index = shown_key(metadata, self._keys)
        if index is not None:
            if request.cache_owner:
                raise InvalidRequest(
                    "cache_owner is for gateways: a key of this scheduler is an owner by itself, "
                    "and cache_salt tells its own clients apart",
                    param="cache_owner",
                )
            request.cache_owner = self._names[index]
        if self._shared:
            request.cache_owner = ""
        if request.sampling.HasField("grammar"):
            request.sampling.grammar.owner = request.cache_owner
