"""The paged KV block pool, and the block tables of tenancies.

Blocks are counted by reference. Released ones are kept for reuse by content.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice, repeat, takewhile

import numpy as np
from surestep_common.invariants import NULL_BLOCK, BoolArray

from .log import CacheLog


@dataclass(slots=True, eq=False)
class BlockTable:
    """Entries first..end-1; those before them were given back, or were never needed."""

    group: int
    first: int
    blocks: list[int]  # of these entries
    _told_first: int = 0
    _told_end: int = 0

    @property
    def end(self) -> int:
        return self.first + len(self.blocks)

    def held(self, since: int, upto: int) -> list[int]:
        """Return the blocks of the entries since..upto-1, without those given back."""
        return self.blocks[max(since - self.first, 0) : max(upto - self.first, 0)]

    def give_back(self, first: int) -> list[int]:
        """Begin at entry `first` from now on; return the blocks before it."""
        count = first - self.first
        given_back, self.blocks[:count] = self.blocks[:count], []
        self.first = first
        return given_back

    def tell(self) -> tuple[int, list[int]]:
        """Return the entries given back and the blocks appended since the last call."""
        count, since = self.first - self._told_first, max(self._told_end, self.first)
        appended = self.blocks[since - self.first :]
        self._told_first, self._told_end = self.first, self.end
        return count, appended


class BlockPool:
    """Blocks 1..num_blocks-1. A block is in use (refs > 0), cached (refs == 0, has a key) or free.

    All KV groups take their blocks from here; one belongs to one group at a time.

    A key names the content of a full block of committed tokens. Cached blocks count as available:
    `allocate` takes free blocks first and then the cached block that was released longest ago.
    """

    def __init__(self, num_blocks: int, log: CacheLog | None = None) -> None:
        self.num_blocks = num_blocks
        self.log = log  # of what is findable
        self._refs = [0] * num_blocks
        self._keys: list[bytes | None] = [None] * num_blocks
        self._block_of: dict[bytes, int] = {}
        self._free = list(range(num_blocks - 1, NULL_BLOCK, -1))
        self._cached: dict[int, None] = {}  # ordered: released longest ago first
        self._drafted = [False] * num_blocks  # the drafter's rows of all its positions are valid
        # Tiers behind the pool have its content: 1 without the drafter's rows, 2 with them.
        self._stored = [0] * num_blocks
        self._unstored: dict[int, None] = {}  # cached ones with more than that; ordered

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` could hand out now."""
        return len(self._free) + len(self._cached)

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` hands out without forgetting content."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Number of blocks with references."""
        return self.num_blocks - 1 - self.num_available

    def allocate(self, count: int) -> list[int]:
        """Return blocks with one reference each and no content. The caller checks availability."""
        assert 0 <= count <= self.num_available, (count, self.num_available)
        blocks = []
        for _ in range(count):
            block = self._free.pop() if self._free else self._evict()
            self._refs[block] = 1
            self._drafted[block] = False
            self._stored[block] = 0
            blocks.append(block)
        return blocks

    def _evict(self) -> int:
        block = next(iter(self._cached))
        del self._cached[block]
        self._unstored.pop(block, None)
        key = self._keys[block]
        assert key is not None
        del self._block_of[key]
        self._keys[block] = None
        if self.log is not None:
            self.log.removed(key)
        return block

    def acquire(self, blocks: Iterable[int]) -> None:
        """Add a reference to each block; cached ones come back into use."""
        refs = self._refs
        for block in blocks:
            if not refs[block]:
                del self._cached[block]
                self._unstored.pop(block, None)
            refs[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """Drop a reference to each block. The last of a sequence are evicted before the first."""
        for block in reversed(list(blocks)):
            assert self._refs[block] > 0, block
            self._refs[block] -= 1
            if self._refs[block]:
                continue
            if self._keys[block] is None:
                self._free.append(block)
            else:
                self._cached[block] = None
                if self._stored[block] < 1 + self._drafted[block]:
                    self._unstored[block] = None

    def publish(self, block: int, key: bytes) -> bool:
        """Give a block in use its content key. Return False if another block has it."""
        assert self._refs[block] > 0, block
        assert self._keys[block] is None, block
        if key in self._block_of:
            return False
        self._block_of[key] = block
        self._keys[block] = key
        return True

    def forget(self, key: bytes) -> None:
        """Make this content unfindable."""
        block = self._block_of.pop(key, None)
        if block is None:
            return
        if self.log is not None:
            self.log.removed(key)
        self._keys[block] = None
        if block in self._cached:
            del self._cached[block]
            self._unstored.pop(block, None)
            self._free.append(block)

    def clear(self) -> None:
        """Make all content unfindable."""
        if self.log is not None:
            self.log.cleared()
        for key in list(self._block_of):
            self.forget(key)

    def withdraw(self, blocks: Iterable[int]) -> None:
        """Make the content of these blocks, which are in use, unfindable."""
        for block in blocks:
            key = self._keys[block]
            if key is not None:
                self.forget(key)

    def mark_drafted(self, blocks: Iterable[int]) -> None:
        """Mark blocks in use of which the drafter's rows of all positions are valid."""
        for block in blocks:
            assert self._refs[block] > 0, block
            self._drafted[block] = True

    def num_drafted(self, blocks: Iterable[int]) -> int:
        """Count the leading blocks that are marked as drafted."""
        return sum(1 for _ in takewhile(self._drafted.__getitem__, blocks))

    def unstored(self, most: int) -> list[tuple[int, bytes, bool]]:
        """Return cached blocks that tiers lack, their keys, and whether drafter's rows are valid.

        Those come first that were released last: the beginning of a sequence before its end.
        """
        keys = self._keys
        found = islice(reversed(self._unstored), most)
        return [(b, key, self._drafted[b]) for b in found if (key := keys[b]) is not None]

    def mark_stored(self, block: int, *, drafted: bool) -> None:
        """Note that tiers have the content of a block in use, perhaps with the drafter's rows."""
        assert self._refs[block] > 0, block
        self._stored[block] = max(self._stored[block], 1 + drafted)

    def pass_over(self, blocks: Iterable[int]) -> None:
        """Leave cached blocks unstored until they are released again."""
        for block in blocks:
            self._unstored.pop(block, None)

    def lookup(self, key: bytes) -> int | None:
        """Return the block with this content, in use or cached."""
        return self._block_of.get(key)

    def leading(self, keys: Iterable[bytes]) -> list[int]:
        """Return the blocks with these contents, up to the first that is missing."""
        found = map(self._block_of.get, keys, repeat(NULL_BLOCK))
        return list(takewhile(bool, found))

    def num_cached(self, blocks: Iterable[int]) -> int:
        """Count the blocks that are available but still have content."""
        return sum(map(self._cached.__contains__, blocks))

    def retain(self, kept: BoolArray, drafted: BoolArray) -> None:
        """Keep the content of blocks [num_blocks] that are `kept`, when none is in use.

        Of those that are not `drafted` the drafter's rows are lost.
        """
        assert not self.num_used
        for block in list(self._cached):
            key = self._keys[block]
            assert key is not None
            if not kept[block]:
                self.forget(key)
        self._drafted = [*map(bool, self._drafted & kept & drafted)]

    @property
    def cached(self) -> list[int]:
        """Blocks that are available but still have content."""
        return list(self._cached)

    def contents(self) -> tuple[BoolArray, BoolArray]:
        """Return which blocks are cached, and in which of them the drafter's rows are valid."""
        cached = np.zeros(self.num_blocks, dtype=np.bool_)
        cached[self.cached] = True
        return cached, cached & np.array(self._drafted)

    def check(self, holders: Iterable[Iterable[int]]) -> None:
        """Assert the pool's invariants, given the block tables of all holders of references."""
        refs = [0] * self.num_blocks
        for table in holders:
            for block in table:
                refs[block] += 1
        assert refs == self._refs, "reference counts"
        free, cached = set(self._free), set(self._cached)
        assert len(free) == len(self._free), "a block is free twice"
        assert not free & cached, "a block is free and cached"
        idle = {block for block in range(1, self.num_blocks) if refs[block] == 0}
        assert free | cached == idle, "a block is lost or free while in use"
        assert all(self._keys[block] is None for block in free), "a free block has content"
        keyed = {key: block for block, key in enumerate(self._keys) if key is not None}
        assert keyed == self._block_of, "the index and the keys differ"
        assert cached <= set(keyed.values()), "a cached block has no content"
        assert set(self._unstored) <= cached, "a block to be stored is not cached"
