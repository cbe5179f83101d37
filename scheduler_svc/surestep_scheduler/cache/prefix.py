"""The prefix cache: full blocks of committed tokens, found by chained hashes.

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
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from hashlib import blake2b

from surestep_common.kv_groups import ALL, KVGroups

from surestep_scheduler.cache.blocks import BlockTable

from .blocks import BlockPool


class PrefixChain:
    """Keys of the full blocks of one growing token list, computed once each."""

    def __init__(
        self, root: bytes, block_size: int, shared_len: int, *, names_next: bool = False
    ) -> None:
        """`root`: see cache_root. `names_next`: a key names the token behind its block."""
        self._block_size, self._shared_len = block_size, shared_len  # see Limits.shared_len
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
            keys.append(blake2b(keys[-1] + content, digest_size=16).digest())
        return keys[since + 1 : upto + 1]


def longest(pool: BlockPool, keys: Sequence[bytes], groups: KVGroups) -> int:
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
    pool: BlockPool, keys: Sequence[bytes], groups: KVGroups, group: int, window: int
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
        for block, key in zip(held, in_group(table.group, behind), strict=True):
            pool.publish(block, key)


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
