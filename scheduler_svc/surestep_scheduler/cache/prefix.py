"""The prefix cache: full blocks of committed tokens, found by chained hashes, and snapshots of the
recurrent state behind them.

    key[0] = H(owner, salt)        key[i+1] = H(key[i], tokens[i*block_size : (i+1)*block_size])

A key therefore names the whole prefix up to and including its block. Owner and
salt keep apart what must not be found by others: see surestep_common.tenants.
Where what is computed of a token depends on more than the tokens before it, the key names that too:
how many leading tokens went in chunks, in the keys of blocks that reach beyond them. And where a
drafter's row of a position, which lies in the block too, is made of the token behind it, the key
of a block names the first token behind the block: the row of its last position is right for every
request that finds it.

Every KV group has blocks of its own under these keys. A prefix is cached if a group that sees all
positions has all of its blocks, and one with a window those that a token behind the prefix sees.

Where a model has recurrent state, a prefix can be gone on from at the lengths of its snapshots. See
"Recurrent state" in docs/change/protocol.md. Ids are handed out like blocks: an id is in use
while a plan in flight names it, to be taken or to be restored, and cached under the key of its
prefix after that. Nothing counts as taken before the result says so.
"""

from __future__ import annotations

from array import array
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from hashlib import blake2b
from typing import NamedTuple, Protocol

import numpy as np
from surestep_common.kv_groups import ALL, KVGroups

from .blocks import BlockPool, BlockTable
from .log import ANY_SOURCE, KEY_BYTES, Content, Source


class PrefixChain:
    """Keys of the full blocks of one growing token list, computed once each."""

    def __init__(
        self,
        root: bytes,
        block_size: int,
        shared_len: int,
        *,
        names_next: bool = False,
        source: Source = ANY_SOURCE,
    ) -> None:
        """`root`: see cache_root. `names_next`: a key names the token behind its block."""
        self._block_size, self._shared_len = block_size, shared_len  # see Limits.shared_len
        self._source = source
        self._ahead = int(names_next)
        self._keys = [root]

    def extend(self, tokens: array[int]) -> None:
        """Compute the keys of all full blocks of `tokens` now, rather than when they are needed."""
        self.keys(tokens, 0, self.count(tokens))

    def count(self, tokens: array[int]) -> int:
        """Return how many leading blocks of `tokens` have keys."""
        return max(0, len(tokens) - self._ahead) // self._block_size

    def keys(self, tokens: array[int], since: int, upto: int) -> list[bytes]:
        """Return the keys of blocks since..upto-1; `tokens` must hold them and never change."""
        size, keys = self._block_size, self._keys
        assert upto <= self.count(tokens)
        for start in range((len(keys) - 1) * size, upto * size, size):
            content = tokens[start : start + size + self._ahead].tobytes()
            if start + size > self._shared_len:
                content += self._shared_len.to_bytes(8)
            keys.append(blake2b(keys[-1] + content, digest_size=KEY_BYTES).digest())
        return keys[since + 1 : upto + 1]

    def content(self, tokens: array[int], entry: int, group: int) -> Content:
        """Return what a KV group has in a block whose key was computed already."""
        begin, keys = entry * self._block_size, self._keys
        (key,) = in_group(group, keys[entry + 1 : entry + 2])
        parent = keys[entry] if entry else None
        return Content(key, parent, tokens[begin : begin + self._block_size], self._source)


class Finder(Protocol):
    """Content of blocks, as far as prefixes are looked for in it."""

    def lookup(self, key: bytes) -> int | None:
        """Return a number for content that there is, and None for other content."""

    def leading(self, keys: Iterable[bytes]) -> list[int]:
        """Return the numbers of the first contents, up to one that is missing."""


def longest(pool: Finder, keys: Sequence[bytes], groups: KVGroups) -> int:
    """Return how many leading blocks with these keys every group has, as far as it needs them."""
    upto = len(keys)
    for group, window in enumerate(groups.windows):
        if window == ALL:
            upto = len(pool.leading(in_group(group, keys[:upto])))
    while True:
        reached = upto
        for group, window in groups.sliding:
            reached = _longest_seen(pool, keys[:reached], groups, group, window)
        if reached == upto:
            return upto
        upto = reached


def _longest_seen(
    pool: Finder, keys: Sequence[bytes], groups: KVGroups, group: int, window: int
) -> int:
    """Return the longest prefix, in blocks, of which all that a token behind it sees is there."""
    upto = len(keys)
    while True:
        first = groups.first_block(window, upto * groups.block_size)
        own = in_group(group, reversed(keys[first:upto]))
        seen = zip(range(upto - 1, first - 1, -1), own, strict=True)
        missing = next((entry for entry, key in seen if pool.lookup(key) is None), None)
        if missing is None:
            return upto
        upto = missing  # every prefix between the two needs it as well


def cached_tables(pool: BlockPool, keys: Sequence[bytes], groups: KVGroups) -> list[BlockTable]:
    """Return what the groups have of a cached prefix, whose blocks have these keys."""
    tables = []
    for group, window in enumerate(groups.windows):
        first = groups.first_block(window, len(keys) * groups.block_size)
        blocks = pool.leading(in_group(group, keys[first:]))
        assert len(blocks) == len(keys) - first
        tables.append(BlockTable(group, first, blocks))
    return tables


def publish(
    pool: BlockPool,
    chain: PrefixChain,
    tokens: array[int],
    tables: Sequence[BlockTable],
    since: int,
    upto: int,
) -> None:
    """Make the blocks of entries since..upto-1, all full of committed tokens, findable."""
    upto = max(since, min(upto, chain.count(tokens)))
    keys = chain.keys(tokens, since, upto)
    for table in tables:
        held = table.held(since, upto)
        behind = keys[len(keys) - len(held) :]
        own = zip(held, in_group(table.group, behind), strict=True)
        for entry, (block, key) in enumerate(own, upto - len(held)):
            if pool.publish(block, key) and pool.log is not None:
                pool.log.stored(chain.content(tokens, entry, table.group))


def forget(pool: BlockPool, keys: Sequence[bytes], groups: KVGroups) -> None:
    """Make what groups with windows have under these keys unfindable."""
    for group, _ in groups.sliding:
        for key in in_group(group, keys):
            pool.forget(key)


def in_group(group: int, keys: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the keys under which a KV group has its blocks of a prefix."""
    if not group:  # the only one of most models, and prompts may have many blocks
        return iter(keys)
    own = group.to_bytes(2)
    return (key + own for key in keys)


def group_of(key: bytes) -> int:
    """Return the KV group that has a block under this key."""
    return int.from_bytes(key[KEY_BYTES:])


class Snapshot(NamedTuple):
    """Recurrent state behind the first `num_blocks` blocks of a prefix."""

    num_blocks: int
    id: int  # 0 = none


class SnapshotCache:
    """Ids 1..num_ids, and the prefixes they stand for."""

    def __init__(self, num_ids: int) -> None:
        self.num_ids = num_ids
        self.pool = BlockPool(1 + num_ids)
        self._num_blocks = [0] * (1 + num_ids)  # by id

    def longest(self, keys: Sequence[bytes], others: Container[bytes] = ()) -> Snapshot:
        """Find the longest prefix with a snapshot, given the chained keys of its blocks.

        Prefixes under `others` have one that is not here.
        """
        for num_blocks in range(len(keys), 0, -1):
            key = keys[num_blocks - 1]
            found = self.pool.lookup(key)
            if found is not None or key in others:
                return Snapshot(num_blocks, found or 0)
        return Snapshot(0, 0)

    def restore(self, snapshot: int, num_blocks: int) -> None:
        """Hold a snapshot from which an admission with so many cached blocks starts."""
        assert self._num_blocks[snapshot] == num_blocks, "the state of another length"
        self.pool.acquire([snapshot])

    def allocate(self) -> int:
        """Return an id to be taken; the caller checks that one is available."""
        (snapshot,) = self.pool.allocate(1)
        return snapshot

    def share(self, snapshot: int) -> None:
        """Hold an id once more that another plan in flight may take."""
        self.pool.acquire([snapshot])

    def num_blocks(self, snapshot: int) -> int:
        """Return the blocks of the prefix that a snapshot stands for."""
        return self._num_blocks[snapshot]

    def publish(self, snapshot: int, key: bytes, num_blocks: int) -> bool:
        """Make a snapshot findable that was taken behind the prefix `key` of `num_blocks` blocks.

        Returns False when there is another snapshot of this prefix.
        """
        self._num_blocks[snapshot] = num_blocks
        self.pool.publish(snapshot, key)
        return self.pool.lookup(key) == snapshot

    def forget(self, key: bytes | None) -> None:
        """Make the snapshot behind this prefix unfindable."""
        if key is not None:
            self.pool.forget(key)

    def release(self, ids: Iterable[int]) -> None:
        """Give up one hold on each id: from now on it may be reused, or found."""
        self.pool.release(ids)

    def retain(self, lengths: Mapping[int, int], block_size: int) -> None:
        """Keep no other snapshots than these, each of so many tokens, when none is in use."""
        kept = np.zeros(1 + self.num_ids, dtype=np.bool_)
        for snapshot, length in lengths.items():
            kept[snapshot] = length == self._num_blocks[snapshot] * block_size
        self.pool.retain(kept, kept)

    def lengths(self, block_size: int) -> dict[int, int]:
        """Return the tokens in each snapshot that is cached, by id."""
        return {held: self._num_blocks[held] * block_size for held in self.pool.cached}

    def check(self, holders: Iterable[Iterable[int]]) -> None:
        """Assert that every id is free, cached, or named by a holder."""
        self.pool.check(holders)
