"""Stored responses: what `previous_response_id`, retrieval and references of items look up.

A record is the JSON of a response and of the items that it was made from. It is not found
under another owner than the one that it was stored for.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable
from hashlib import blake2b
from typing import NamedTuple, Protocol

from surestep_gateway.api_keys import Caller
from surestep_gateway.settings.config import GatewaySettings

_MOST_IN_MEMORY = 10_000  # records; beyond, the owner with most loses its oldest
RECORD_SHARE = 4  # a record takes at most this part of the memory for all


class Store(Protocol):
    """Records by their keys, for a while. Methods raise Unavailable."""

    async def get(self, key: str) -> bytes | None:
        """Return a record, None if there is none or no longer."""

    async def put(self, key: str, record: bytes) -> bool:
        """Store a record; return whether it is stored."""

    async def delete(self, key: str) -> bool:
        """Delete a record; return whether there was one."""

    async def close(self) -> None:
        """Release connections."""


def key_of(caller: Caller, response_id: str) -> str:
    """Return the key of a caller's response.

    Owners are the owners of API keys; without keys it is enough to know the id, which cannot
    be guessed.
    """
    owner = caller.client.name if caller.client is not None else ""
    return f"{blake2b(owner.encode(), digest_size=16).hexdigest()}:{response_id}"


def open_store(settings: GatewaySettings) -> Store:
    """Return the store that the settings name. Raise InvalidRequest."""
    where = settings.responses_store.get_secret_value()
    if where == "none":
        return NoStore()
    if where == "memory":
        return MemoryStore(
            most=_MOST_IN_MEMORY,
            most_bytes=settings.responses_store_bytes,
            lifetime_s=settings.responses_store_ttl,
        )
    from .redis_store import RedisStore

    return RedisStore(where, settings.responses_store_bytes, settings.responses_store_ttl)


class NoStore:
    """Stores nothing."""

    async def get(self, key: str) -> bytes | None:
        return None

    async def put(self, key: str, record: bytes) -> bool:
        return False

    async def delete(self, key: str) -> bool:
        return False

    async def close(self) -> None:
        pass


class _Entry(NamedTuple):
    record: bytes
    expires: float


class MemoryStore:
    """Records in the memory of this gateway, bounded in number, bytes and age.

    Where there are too many, the owner with most records loses its oldest one; where they are too
    large, the owner with most bytes does.
    """

    def __init__(
        self,
        *,
        most: int,
        most_bytes: int,
        lifetime_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._most = most
        self._most_bytes = most_bytes
        self._lifetime_s = lifetime_s
        self._clock = clock
        self._entries: dict[str, OrderedDict[str, _Entry]] = {}  # of each owner, the oldest first
        self._bytes: dict[str, int] = {}  # of each owner
        self._count = 0

    async def get(self, key: str) -> bytes | None:
        owner = _owner(key)
        self._expire(owner)
        entries = self._entries.get(owner)
        entry = entries.get(key) if entries is not None else None
        return entry.record if entry is not None else None

    async def put(self, key: str, record: bytes) -> bool:
        if len(record) > self._most_bytes // RECORD_SHARE:
            return False
        owner = _owner(key)
        await self.delete(key)
        entries = self._entries.setdefault(owner, OrderedDict())
        entries[key] = _Entry(record, self._clock() + self._lifetime_s)
        self._bytes[owner] = self._bytes.get(owner, 0) + len(record)
        self._count += 1
        for one in list(self._entries):
            self._expire(one)
        while (loser := self._loser()) is not None:
            self._remove(loser, next(iter(self._entries[loser])))
        return key in self._entries.get(owner, {})

    async def delete(self, key: str) -> bool:
        owner = _owner(key)
        self._expire(owner)
        if key not in self._entries.get(owner, {}):
            return False
        self._remove(owner, key)
        return True

    async def close(self) -> None:
        await asyncio.sleep(0)

    def _loser(self) -> str | None:
        """Return the owner who takes most of what there is too much of, None if all fits."""
        if self._count > self._most:
            return max(self._entries, key=lambda owner: len(self._entries[owner]))
        if sum(self._bytes.values()) > self._most_bytes:
            return max(self._bytes, key=self._bytes.__getitem__)
        return None

    def _expire(self, owner: str) -> None:
        now = self._clock()
        for key, entry in list(self._entries.get(owner, {}).items()):
            if entry.expires > now:
                return  # those behind it are newer
            self._remove(owner, key)

    def _remove(self, owner: str, key: str) -> None:
        entries = self._entries[owner]
        self._bytes[owner] -= len(entries.pop(key).record)
        self._count -= 1
        if not entries:
            del self._entries[owner], self._bytes[owner]


def _owner(key: str) -> str:
    return key.partition(":")[0]
