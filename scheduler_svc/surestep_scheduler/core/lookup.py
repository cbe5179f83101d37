"""Find the cached prefix of a waiting request: its blocks and the recurrent state behind them."""

from __future__ import annotations

from typing import NamedTuple

from surestep_common.kv_groups import ALL

from surestep_scheduler.cache import prefix
from surestep_scheduler.cache.blocks import BlockPool, BlockTable
from surestep_scheduler.cache.snapshots import SnapshotCache

from .limits import Limits
from .sequence import Sequence


class CachedPrefix(NamedTuple):
    """A prefix of a waiting request that can be gone on from."""

    num_blocks: int
    tables: list[BlockTable]  # by KV group
    snapshot_id: int  # of the state behind it; 0 = none
    branch_len: int = 0  # tokens of a longer prefix that is cached without its state; 0 = none


class Lookup(NamedTuple):
    """Blocks for a waiting request."""

    cached: CachedPrefix
    fresh: list[int]  # blocks that it needs besides, by KV group
    missing: int  # those that there are too few; above 0: it cannot be admitted now

    @property
    def num_fresh(self) -> int:
        return sum(self.fresh)


def cached_prefix(
    seq: Sequence, pool: BlockPool, snapshots: SnapshotCache, limits: Limits
) -> CachedPrefix:
    """Find the longest prefix that is cached, leaving a token or more to compute."""
    groups, snapshot_id = limits.groups, 0
    wanted = limits.enable_prefix_caching and not seq.num_non_finite and not seq.needs_whole_prompt
    most = (len(seq.tokens) - 1) // limits.block_size if wanted else 0
    keys = seq.chain.keys(seq.tokens, 0, most)
    keys = keys[: prefix.longest(pool, keys, groups)]
    known_len = len(keys) * limits.block_size
    while limits.recurrent:
        num_blocks, snapshot_id = snapshots.longest(keys)
        keys = keys[:num_blocks]
        reached = prefix.longest(pool, keys, groups)
        if reached == num_blocks:
            break
        keys = keys[:reached]
    branch_len = known_len // limits.snapshot_border * limits.snapshot_border
    if not limits.usable_snapshots or branch_len <= len(keys) * limits.block_size:
        branch_len = 0
    tables = prefix.cached_tables(pool, keys, groups)
    return CachedPrefix(len(keys), tables, snapshot_id, branch_len)


def fresh_blocks(cached: CachedPrefix, cover: int, limits: Limits) -> list[int]:
    """Return how many blocks a request needs besides to begin, by KV group.

    Those that see all positions have blocks for all `cover` tokens from the beginning. Those with
    windows get them as the request goes on, and give others back.
    """
    groups, whole = limits.groups, -(-cover // limits.block_size)
    ends = (
        whole
        if window == ALL
        else min(whole, table.first + groups.most_at_once(window, limits.prompt_chunk))
        for window, table in zip(groups.windows, cached.tables, strict=True)
    )
    return [end - cached.num_blocks for end in ends]
