"""What is there of a waiting request already: blocks of its prefix, and the state behind them."""

from __future__ import annotations

from typing import NamedTuple

from surestep_scheduler.cache import prefix
from surestep_scheduler.cache.blocks import BlockPool
from surestep_scheduler.cache.snapshots import SnapshotCache

from .limits import Limits
from .sequence import Sequence


class Lookup(NamedTuple):
    """Blocks for a waiting request."""

    cached: list[int]  # blocks that hold a prefix of it
    snapshot_id: int  # of the state behind them; 0 = none
    fresh: int  # blocks that it needs besides
    missing: int  # those that there are too few; above 0: it cannot be admitted now


def cached_prefix(
    seq: Sequence, pool: BlockPool, snapshots: SnapshotCache, limits: Limits
) -> tuple[list[int], int]:
    """Return blocks that hold a prefix already, and the id of the state behind it (0 = none)."""
    if not limits.enable_prefix_caching or seq.num_non_finite or seq.needs_whole_prompt:
        return [], 0
    blocks = prefix.match(pool, seq.chain, seq.tokens, limits.block_size)
    if not limits.recurrent:
        return blocks, 0
    num_blocks, snapshot_id = snapshots.longest(seq.chain.keys(seq.tokens, 0, len(blocks)))
    return blocks[:num_blocks], snapshot_id
