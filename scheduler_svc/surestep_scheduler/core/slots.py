"""Slots and their blocks: the cached prefix that a request finds, its numbers, its block tables.

The ledger beside the numbers counts every scheduled token of a tenancy, which ends accepted,
rejected or discarded.
"""

from __future__ import annotations

from collections.abc import Container
from collections.abc import Sequence as Seq
from typing import NamedTuple

import numpy as np
from surestep_common.invariants import BoolArray, IntArray, LedgerError
from surestep_common.kv_groups import ALL, KVGroups

from surestep_scheduler.cache import prefix
from surestep_scheduler.cache.blocks import BlockPool, BlockTable
from surestep_scheduler.cache.prefix import Finder, Snapshot, SnapshotCache

from .limits import Limits
from .messages import Extend, GiveBack
from .sequence import Sequence, Tenancy


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
    keys = wanted_keys(seq, limits)
    keys = keys[: prefix.longest(pool, keys, limits.groups)]
    known_len = len(keys) * limits.block_size
    num_blocks, snapshot_id = usable_prefix(keys, pool, snapshots, limits)
    branch_len = known_len // limits.snapshot_border * limits.snapshot_border
    if not limits.usable_snapshots or branch_len <= num_blocks * limits.block_size:
        branch_len = 0
    tables = prefix.cached_tables(pool, keys[:num_blocks], limits.groups)
    return CachedPrefix(num_blocks, tables, snapshot_id, branch_len)


def wanted_keys(seq: Sequence, limits: Limits) -> list[bytes]:
    """Return the keys of the blocks that a request would take from a cache, from its first on."""
    wanted = limits.enable_prefix_caching and not seq.num_non_finite and not seq.needs_whole_prompt
    most = (len(seq.tokens) - 1) // limits.block_size if wanted else 0
    return seq.chain.keys(seq.tokens, 0, most)


def usable_prefix(
    keys: Seq[bytes],
    pool: Finder,
    snapshots: SnapshotCache,
    limits: Limits,
    other_snapshots: Container[bytes] = (),
) -> Snapshot:
    """Return the longest prefix with these keys that can be gone on from, with its snapshot.

    `other_snapshots`: see SnapshotCache.longest.
    """
    while True:
        reached = prefix.longest(pool, keys, limits.groups)
        if not limits.recurrent:
            return Snapshot(reached, 0)
        found = snapshots.longest(keys[:reached], other_snapshots)
        if prefix.longest(pool, keys[: found.num_blocks], limits.groups) == found.num_blocks:
            return found
        keys = keys[: found.num_blocks]


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


class SlotTable:
    """Structure of arrays [num_slots], lengths in tokens.

    A line describes the newest tenancy of its slot. It stays as it was when the tenancy ends, and
    the slot is not used again while a plan in flight still means it.
    """

    def __init__(self, num_slots: int, num_groups: int = 1) -> None:
        self.open = np.zeros(num_slots, dtype=np.bool_)  # False: late results are dropped
        self.tenancy = np.full(num_slots, None, dtype=np.object_)
        self.slot_epoch = np.zeros(num_slots, dtype=np.int64)
        # Constant during a tenancy.
        self.num_cached = np.zeros(num_slots, dtype=np.int64)  # committed at admission
        self.prefill_len = np.zeros(num_slots, dtype=np.int64)  # known at admission
        self.prompt_len = np.zeros(num_slots, dtype=np.int64)  # of the request
        self.shared_len = np.zeros(num_slots, dtype=np.int64)  # see Limits.shared_len
        self.branch_len = np.zeros(num_slots, dtype=np.int64)  # see CachedPrefix; 0 = none
        self.max_len = np.zeros(num_slots, dtype=np.int64)  # of the request
        self.draft_cap = np.zeros(num_slots, dtype=np.int64)  # most drafts per row
        self.forced_cap = np.zeros(num_slots, dtype=np.int64)  # with those of its grammar
        self.pools = np.zeros(num_slots, dtype=np.bool_)  # a vector is wanted, no tokens
        self.scored = np.zeros(num_slots, dtype=np.bool_)  # log-probabilities are wanted
        self.adapter = np.zeros(num_slots, dtype=np.int64)  # its place, plus 1; 0 = none
        self.tenant = np.zeros(num_slots, dtype=np.int64)  # index of the tenant
        self.paid_len = np.zeros(num_slots, dtype=np.int64)  # planned, and paid for, before it
        self.settled_at = np.zeros(num_slots, dtype=np.int64)  # committed: what it lost is made up
        # How far it is.
        tables = num_groups, num_slots  # of block tables
        self.capacity = np.zeros(tables, dtype=np.int64)  # covered by its blocks
        self.first_block = np.zeros(tables, dtype=np.int64)  # that it has not given back
        self.committed = np.zeros(num_slots, dtype=np.int64)  # KV is valid by the applied results
        self.len_hi = np.zeros(num_slots, dtype=np.int64)  # if all in flight is accepted
        self.publish_at = np.zeros(num_slots, dtype=np.int64)  # `committed` fills the next block
        self.folded = np.zeros(num_slots, dtype=np.int64)  # in the recurrent state
        self.drafter_len = np.zeros(num_slots, dtype=np.int64)  # covered by the drafter's state
        self.mark_at = np.zeros(num_slots, dtype=np.int64)  # `drafter_len` covers the next block
        self.snapshot_key = np.full(num_slots, None, dtype=np.object_)  # taken while it decodes
        self.planned_step = np.zeros(num_slots, dtype=np.int64)  # newest step with a row of it
        self.applied_step = np.zeros(num_slots, dtype=np.int64)  # newest step applied; 0 = none
        self.accepted = np.zeros(num_slots, dtype=np.int64)  # drafts accepted in `applied_step`
        # Figures that are added to the sequence's when the tenancy ends.
        self.num_steps = np.zeros(num_slots, dtype=np.int64)  # that emitted
        self.num_drafts = np.zeros(num_slots, dtype=np.int64)
        self.num_accepted = np.zeros(num_slots, dtype=np.int64)  # and emitted
        self.ledger = Ledger(num_slots)

    def admit(
        self,
        tenancy: Tenancy,
        *,
        prefill_len: int,
        max_len: int,
        draft_cap: int,
        forced_cap: int,
        capacity: list[int],
        branch_len: int,
        publish_at: int,
        mark_at: int,
    ) -> None:
        """Fill the line of a tenancy that begins."""
        slot, num_cached = tenancy.slot, tenancy.num_cached
        self.open[slot] = True
        self.tenancy[slot] = tenancy
        self.slot_epoch[slot] = tenancy.slot_epoch
        self.num_cached[slot] = self.committed[slot] = self.len_hi[slot] = num_cached
        self.folded[slot] = num_cached
        self.drafter_len[slot] = tenancy.drafter_len
        self.mark_at[slot] = mark_at
        self.snapshot_key[slot] = None
        seq = tenancy.seq
        self.tenant[slot], self.paid_len[slot] = seq.tenant.index, seq.computed_len
        lost = max(seq.computed_len - num_cached, 0) if seq.num_displaced else 0
        self.settled_at[slot] = seq.computed_len + lost if lost else 0
        self.prompt_len[slot], self.shared_len[slot] = seq.prompt_len, seq.shared_len
        self.prefill_len[slot], self.branch_len[slot] = prefill_len, branch_len
        self.max_len[slot] = max_len
        self.draft_cap[slot], self.forced_cap[slot] = draft_cap, forced_cap
        self.pools[slot] = seq.request.pooling > 0
        self.adapter[slot] = tenancy.adapter
        self.scored[slot] = seq.request.want_logprobs or seq.needs_prompt_logprobs
        self.capacity[:, slot] = capacity
        self.first_block[:, slot] = [table.first for table in tenancy.tables]
        self.publish_at[slot] = publish_at
        self.planned_step[slot] = self.applied_step[slot] = self.accepted[slot] = 0
        self.num_steps[slot] = self.num_drafts[slot] = self.num_accepted[slot] = 0
        self.ledger.open(slot)

    def plan(self, step: int, slot: IntArray, width: IntArray) -> None:
        """Enter rows [R] of `width` tokens as in flight."""
        self.ledger.schedule(slot, width)
        self.len_hi[slot] += width
        self.planned_step[slot] = step

    def settle(
        self, step: int, slot: IntArray, width: IntArray, advance: IntArray, accepted: IntArray
    ) -> None:
        """Commit the first `advance` tokens of rows [R] of `width` tokens, which were in flight."""
        self.ledger.settle(slot, width, advance)
        self.committed[slot] += advance
        self.len_hi[slot] -= width - advance
        self.applied_step[slot] = step
        self.accepted[slot] = accepted

    def follow(self, slot: IntArray, folded: IntArray, drafter_len: IntArray) -> None:
        """Enter how far the recurrent and the drafter's state of rows [R] have come."""
        self.folded[slot] = folded
        self.drafter_len[slot] = drafter_len

    def count(self, slot: IntArray, emits: BoolArray, drafts: IntArray, accepted: IntArray) -> None:
        """Count for rows [R] steps that emitted, drafts verified and drafts accepted."""
        self.num_steps[slot] += emits
        self.num_drafts[slot] += drafts
        self.num_accepted[slot] += accepted

    def covered(self, slot: IntArray | int) -> IntArray:
        """Return the tokens [R] that the blocks of slots cover in all KV groups."""
        tokens: IntArray = self.capacity[:, slot].min(axis=0)
        return tokens

    def close(self, slot: int) -> None:
        """End a tenancy. Raises LedgerError when its books do not balance."""
        self.ledger.close(slot, **self._lengths(slot))
        self.open[slot] = False

    def check(self, slot: int) -> None:
        """Raise when lengths and ledger of a running tenancy do not fit together."""
        assert self.open[slot]
        assert self.num_cached[slot] <= self.committed[slot] <= self.len_hi[slot]
        assert self.len_hi[slot] <= self.covered(slot)
        assert self.committed[slot] < self.publish_at[slot]
        assert self.num_cached[slot] <= self.folded[slot] <= self.committed[slot]
        assert self.drafter_len[slot] <= self.committed[slot]
        assert self.drafter_len[slot] < self.mark_at[slot]
        assert self.applied_step[slot] <= self.planned_step[slot]
        self.ledger.check(slot, **self._lengths(slot))

    def _lengths(self, slot: int) -> dict[str, int]:
        committed = int(self.committed[slot])
        return {
            "in_flight": int(self.len_hi[slot]) - committed,
            "committed": committed - int(self.num_cached[slot]),
        }


class Ledger:
    """Counts of tokens (positions of planned rows) by slot [num_slots], for its newest tenancy.

    Kept apart from the lengths they must match.
    """

    def __init__(self, num_slots: int) -> None:
        self.scheduled = np.zeros(num_slots, dtype=np.int64)
        self.accepted = np.zeros(num_slots, dtype=np.int64)
        self.rejected = np.zeros(num_slots, dtype=np.int64)
        self.discarded = np.zeros(num_slots, dtype=np.int64)

    def open(self, slot: int) -> None:
        for column in (self.scheduled, self.accepted, self.rejected, self.discarded):
            column[slot] = 0

    def schedule(self, slot: IntArray, width: IntArray) -> None:
        """Enter planned rows [R] of `width` tokens each."""
        self.scheduled[slot] += width

    def settle(self, slot: IntArray, width: IntArray, advance: IntArray) -> None:
        """Enter that rows [R] of `width` tokens each committed the first `advance` of them."""
        self.accepted[slot] += advance
        self.rejected[slot] += width - advance

    def check(self, slot: int, *, in_flight: int, committed: int) -> None:
        """Check invariant 6 for a tenancy that computed `committed` tokens. Raises LedgerError."""
        scheduled, accepted = int(self.scheduled[slot]), int(self.accepted[slot])
        rejected, discarded = int(self.rejected[slot]), int(self.discarded[slot])
        settled = accepted + rejected + discarded
        if scheduled != settled + in_flight or accepted != committed or in_flight < 0:
            raise LedgerError(
                f"slot {slot}: {scheduled} tokens scheduled, {accepted} accepted, {rejected} "
                f"rejected, {discarded} discarded with {in_flight} in flight, {committed} committed"
            )

    def close(self, slot: int, *, in_flight: int, committed: int) -> None:
        """End a tenancy; what is in flight will be discarded when its results arrive."""
        self.check(slot, in_flight=in_flight, committed=committed)
        self.discarded[slot] += in_flight
        self.check(slot, in_flight=0, committed=committed)


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
