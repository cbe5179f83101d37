"""The block tables of all tenancies: how they grow, and what they give back."""

from __future__ import annotations

import numpy as np
from surestep_common.invariants import IntArray
from surestep_common.kv_groups import KVGroups

from surestep_scheduler.cache.blocks import BlockPool

from .messages import Extend, GiveBack
from .sequence import Tenancy
from .slots import SlotTable


class Tables:
    """G KV groups that take their blocks from one pool."""

    def __init__(self, groups: KVGroups, pool: BlockPool, slots: SlotTable) -> None:
        self.groups = groups
        self._pool, self._slots = pool, slots
        self._changed = dict[Tenancy, None]()  # since the newest plan

    def admit(self, tenancy: Tenancy) -> None:
        """Announce the tables of a new tenancy with the next plan."""
        self._changed[tenancy] = None

    def drop(self, tenancy: Tenancy) -> None:
        """Announce nothing of a tenancy that ends."""
        self._changed.pop(tenancy, None)

    def missing(self, slot: IntArray, length: IntArray) -> IntArray:
        """Return the blocks [G, R] that slots [R] lack in each group for so many tokens [R]."""
        uncovered = length - self._slots.capacity[:, slot]
        blocks: IntArray = np.maximum(-(-uncovered // self.groups.block_size), 0)
        return blocks

    def extend(self, slot: IntArray, num_blocks: IntArray) -> None:
        """Append blocks [G, R] to running tenancies. The caller checks that there are enough."""
        blocks, end = self._pool.allocate(int(num_blocks.sum())), 0
        self._slots.capacity[:, slot] += num_blocks * self.groups.block_size
        for group, row in zip(*(index.tolist() for index in num_blocks.nonzero()), strict=True):
            tenancy = self._slots.tenancy[slot[row]]
            start, end = end, end + int(num_blocks[group, row])
            tenancy.tables[group].blocks += blocks[start:end]
            self._changed[tenancy] = None

    def give_back(self, slot: IntArray) -> None:
        """Release blocks of slots [R] that no position from their committed length on sees.

        No row in flight touches them: it runs from that length or from a greater one.
        """
        first_block = self._slots.first_block
        for group, window in self.groups.sliding:
            first = self.groups.first_blocks(window, self._slots.committed[slot])
            for row in (first > first_block[group, slot]).nonzero()[0].tolist():
                tenancy = self._slots.tenancy[slot[row]]
                self._pool.release(tenancy.tables[group].give_back(int(first[row])))
                self._changed[tenancy] = None
            first_block[group, slot] = first

    def will_give_back(self, slot: IntArray) -> bool:
        """Return whether one of these slots [R] does when everything in flight is answered."""
        first_block, len_hi = self._slots.first_block, self._slots.len_hi[slot]
        return any(
            bool((self.groups.first_blocks(window, len_hi) > first_block[group, slot]).any())
            for group, window in self.groups.sliding
        )

    def changes(self) -> tuple[list[GiveBack], list[Extend]]:
        """Return what has changed since the last call, for the next plan."""
        give_backs, extends = list[GiveBack](), list[Extend]()
        for tenancy in self._changed:
            for table in tenancy.tables:
                count, blocks = table.tell()
                if count:
                    give_backs.append(GiveBack(tenancy.slot, table.group, count))
                if blocks:
                    extends.append(Extend(tenancy.slot, table.group, blocks))
        self._changed = {}
        return give_backs, extends
