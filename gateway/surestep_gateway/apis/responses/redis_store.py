"""Stored responses in Redis or Valkey, where all gateways of a model find them."""

from __future__ import annotations

import logging
from collections.abc import Awaitable
from typing import Any, TypeVar

from surestep_common.addresses import redis_of
from surestep_common.errors import Unavailable
from surestep_common.log import Sparingly

from .store import RECORD_SHARE

_sparingly = Sparingly(logging.getLogger(__name__))

T = TypeVar("T")

_PREFIX = "surestep:responses:"
_TIMEOUT_S = 2.0  # of one command, connecting included


class RedisStore:
    """Records under keys that expire; the server's `maxmemory` bounds them all."""

    def __init__(self, url: str, most_bytes: int, lifetime_s: float) -> None:
        """Raise InvalidRequest for a URL that is none, and where the client is not installed."""
        with redis_of("--responses-store"):
            import redis.asyncio as redis
            from redis.exceptions import RedisError

            self._client: Any = redis.from_url(
                url, socket_timeout=_TIMEOUT_S, socket_connect_timeout=_TIMEOUT_S
            )
        self._errors = (RedisError, OSError, TimeoutError)
        self._most_bytes = most_bytes
        self._lifetime_ms = max(1, round(lifetime_s * 1000))

    async def get(self, key: str) -> bytes | None:
        record: bytes | None = await self._asked(self._client.get(_PREFIX + key))
        return record

    async def put(self, key: str, record: bytes) -> bool:
        if len(record) > self._most_bytes // RECORD_SHARE:
            return False
        await self._asked(self._client.set(_PREFIX + key, record, px=self._lifetime_ms))
        return True

    async def delete(self, key: str) -> bool:
        return bool(await self._asked(self._client.delete(_PREFIX + key)))

    async def close(self) -> None:
        await self._client.aclose()

    async def _asked(self, answer: Awaitable[T]) -> T:
        try:
            return await answer
        except self._errors as error:
            _sparingly.warning("the store of responses does not answer: %s", error)
            raise Unavailable("the store of responses does not answer", retry_after=1.0) from error
