"""The tier in Redis or Valkey, where all replicas of a model find it.

Entries of all identities share a bound. A sorted set says when each was used last, and how large it
is; who writes gives up what was used longest ago. What the server has evicted itself is missed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import torch
from surestep_common.addresses import redis_of

from .entry import HEAD_BYTES, Entry, EntryForm, Name, Refused

P = ParamSpec("P")
T = TypeVar("T")

_PREFIX = "{surestep:kv}:"  # in braces: a cluster keeps all in one place
_TIMEOUT_S = 1.0  # of one command, connecting included
_MOST_EVICTED = 64  # by one write
# KEYS: entry, times of use, sum of bytes. ARGV: entry, its name in the set, time, bytes, most of
# them.
_WRITE = f"""
redis.call('SET', KEYS[1], ARGV[1])
if redis.call('ZADD', KEYS[2], ARGV[3], ARGV[2]) == 1 then
  redis.call('INCRBY', KEYS[3], ARGV[4])
end
for _ = 1, {_MOST_EVICTED} do
  if tonumber(redis.call('GET', KEYS[3]) or 0) <= tonumber(ARGV[5]) then break end
  local oldest = redis.call('ZPOPMIN', KEYS[2])[1]
  if not oldest then redis.call('SET', KEYS[3], 0) break end
  local name, bytes = oldest:match('^(.*) (%d+)$')
  redis.call('UNLINK', '{_PREFIX}' .. name)
  redis.call('DECRBY', KEYS[3], bytes)
end
"""
_REMOVE = """
redis.call('UNLINK', KEYS[1])
if redis.call('ZREM', KEYS[2], ARGV[1]) == 1 then redis.call('DECRBY', KEYS[3], ARGV[2]) end
"""


class StoreTier:
    """Entries of one identity in a store."""

    label = "store"

    def __init__(self, url: str, most_bytes: int, form: EntryForm) -> None:
        """Connect at the first call. Raises InvalidRequest as `client_of` does."""
        self._client, self._error = client_of(url)
        self._most_bytes, self._form = most_bytes, form
        self._write = self._client.register_script(_WRITE)
        self._remove = self._client.register_script(_REMOVE)

    def _name(self, name: Name) -> str:
        return f"{self._form.identity.hex()}:{name}"

    def _keys(self, name: Name) -> list[str]:
        return [_PREFIX + self._name(name), f"{_PREFIX}used", f"{_PREFIX}bytes"]

    def present(self, names: Sequence[Name]) -> list[bool]:
        pipeline = self._client.pipeline(transaction=False)
        for name in names:
            pipeline.exists(self._keys(name)[0])
        return [bool(count) for count in self._call(pipeline.execute)]

    def read(self, name: Name, nbytes: int) -> Entry | None:
        key, used, _ = self._keys(name)
        length = self._call(self._client.strlen, key)  # nothing larger is fetched
        if not length:
            return None
        if length != HEAD_BYTES + nbytes:
            raise Refused(f"it has {length} bytes")
        data = self._call(self._client.get, key)
        if data is None:
            return None
        content = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        entry = self._form.unpack(name, content, nbytes)
        member = f"{self._name(name)} {entry.nbytes}"
        self._call(self._client.zadd, used, {member: time.time()}, xx=True)
        return entry

    def write(self, name: Name, entry: Entry) -> None:
        value = b"".join(entry.parts)
        member = f"{self._name(name)} {len(value)}"
        args = [value, member, time.time(), len(value), self._most_bytes]
        self._call(self._write, keys=self._keys(name), args=args)

    def remove(self, names: Sequence[Name]) -> None:
        for name in names:
            key = self._keys(name)[0]
            length = self._call(self._client.strlen, key)
            args = [f"{self._name(name)} {length}", length]
            self._call(self._remove, keys=self._keys(name), args=args)

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def _call(self, work: Callable[P, T], *args: P.args, **named: P.kwargs) -> T:
        try:
            return work(*args, **named)
        except self._error as error:
            raise OSError(str(error)) from error


def client_of(url: str) -> tuple[Any, type[Exception]]:
    """Return a client, which is not connected yet, and its errors.

    Raises InvalidRequest for a URL that is none, and where the client's package is missing.
    """
    with redis_of("--kv-offloading-store"):
        import redis

        timeouts = {"socket_timeout": _TIMEOUT_S, "socket_connect_timeout": _TIMEOUT_S}
        client: Any = redis.Redis.from_url(url, protocol=2, **timeouts)
    return client, redis.RedisError
