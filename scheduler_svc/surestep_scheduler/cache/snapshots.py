"""Snapshots of recurrent state: the lengths at which a cached prefix can be gone on from.

See "Recurrent state" in docs/change/protocol.md. Ids are handed out like blocks: an id is in use
while a plan in flight names it, to be taken or to be restored, and cached under the key of its
prefix after that. Nothing counts as taken before the result says so.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from .blocks import BlockPool


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

    def longest(self, keys: Sequence[bytes]) -> Snapshot:
        """Find the longest prefix with a snapshot, given the chained keys of its blocks."""
        for num_blocks in range(len(keys), 0, -1):
            found = self.pool.lookup(keys[num_blocks - 1])
            if found is not None:
                return Snapshot(num_blocks, found)
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

    def check(self, holders: Iterable[Iterable[int]]) -> None:
        """Assert that every id is free, cached, or named by a holder."""
        self.pool.check(holders)
