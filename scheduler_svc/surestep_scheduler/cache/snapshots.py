"""Snapshots of recurrent state: the lengths at which a cached prefix can be gone on from.

See "Recurrent state" in docs/protocol.md. Ids are handed out like blocks: an id is in use while a
plan in flight names it, to be taken or to be restored, and cached under the key of its prefix
after that. Nothing counts as taken before the result says so.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from surestep_common.invariants import BoolArray, IntArray

from surestep_scheduler.core.counters import Counters
from surestep_scheduler.core.limits import Limits
from surestep_scheduler.core.messages import Arms, Plan
from surestep_scheduler.core.slots import SlotTable

from .blocks import BlockPool

_NONE = np.zeros(0, dtype=np.int64)
_NO_ARMS = Arms(_NONE, _NONE, _NONE)


class Snapshot(NamedTuple):
    """Recurrent state behind the first `num_blocks` blocks of a prefix."""

    num_blocks: int
    id: int  # 0 = none


class SnapshotCache:
    """Ids 1..num_snapshots, and the prefixes they stand for."""

    def __init__(self, limits: Limits, counters: Counters) -> None:
        usable = limits.recurrent and limits.enable_prefix_caching
        self._limits = limits
        self._counters = counters
        self.pool = BlockPool(1 + (limits.num_snapshots if usable else 0))
        self._num_blocks = [0] * self.pool.num_blocks  # by id
        self._interval = _interval(limits)
        # Lengths at which a prompt's state is a block's and can be gone on from.
        self._border = math.lcm(limits.block_size, limits.prompt_chunk)

    def longest(self, keys: Sequence[bytes]) -> Snapshot:
        """The longest prefix with a snapshot, given the chained keys of its blocks."""
        for num_blocks in range(len(keys), 0, -1):
            found = self.pool.lookup(keys[num_blocks - 1])
            if found is not None:
                return Snapshot(num_blocks, found)
        return Snapshot(0, 0)

    def restore(self, snapshot: int, num_blocks: int) -> None:
        """An admission starts from it, unless it is 0."""
        if self.pool.num_blocks > 1:
            self._counters.snapshot_queries += 1
            self._counters.snapshot_hits += snapshot > 0
        assert not self._limits.recurrent or bool(snapshot) == bool(num_blocks)
        if snapshot:
            assert self._num_blocks[snapshot] == num_blocks, "the state of another length"
            self.pool.acquire([snapshot])

    def arm(
        self, slots: SlotTable, in_flight: Iterable[Plan], slot: IntArray, num_tokens: IntArray
    ) -> Arms:
        """What a plan with rows [R] of `num_tokens` prompt tokens, 0 = decoding, asks for.

        Of a prompt that is its last boundary of blocks and, as long as ids are free, the last one
        of each chunk before; of a request that decodes the next length that it may come to. Where
        workers compute prompts in chunks, a boundary is one of theirs too, and what is decoded
        would be of no use to others: the next turn of a conversation computes it in chunks.
        """
        if self.pool.num_blocks == 1:
            return _NO_ARMS
        length, wanted, spare = self._lengths(slots, slot, num_tokens)
        known = _ids_in_flight(in_flight)
        rows, ids = list[int](), list[int]()
        for row in wanted.nonzero()[0].tolist():
            taker = known.get((int(slot[row]), int(length[row])))
            if taker is not None:  # whether a row in flight comes so far is not known yet
                self.pool.acquire([taker])
            elif self.pool.num_free or (self.pool.num_available and not spare[row]):
                taker = self._allocate()
            else:
                continue
            rows.append(row)
            ids.append(taker)
        armed = np.array(rows, dtype=np.int64)
        return Arms(armed, length[armed], np.array(ids, dtype=np.int64))

    def _lengths(
        self, slots: SlotTable, slot: IntArray, num_tokens: IntArray
    ) -> tuple[IntArray, BoolArray, BoolArray]:
        """Per row [R]: the length to arm, whether to, and whether only if an id is free."""
        size, decoding = self._border, num_tokens == 0
        prefill_len, start = slots.prefill_len[slot], slots.len_hi[slot]
        shared_len = slots.shared_len[slot]
        last = np.minimum(prefill_len - 1, shared_len) // size * size
        chunk = np.minimum((start + num_tokens) // size * size, last)
        done = np.maximum(slots.folded[slot], prefill_len)
        following = (done // self._interval + 1) * self._interval
        length = np.where(decoding, following, chunk)
        wanted = np.where(decoding, following <= np.minimum(start, shared_len), chunk > start)
        return length, wanted, ~decoding & (chunk < last)

    def _allocate(self) -> int:
        self._counters.snapshot_evictions += not self.pool.num_free
        (snapshot,) = self.pool.allocate(1)
        return snapshot

    def publish(self, snapshot: int, key: bytes, num_blocks: int) -> bool:
        """It was taken behind the prefix `key` of `num_blocks` blocks. False: there is another."""
        self._counters.snapshots_taken += 1
        self._num_blocks[snapshot] = num_blocks
        self.pool.publish(snapshot, key)
        return self.pool.lookup(key) == snapshot

    def forget(self, key: bytes | None) -> None:
        """Nobody shall start from this prefix any more."""
        if key is not None:
            self.pool.forget(key)

    def acknowledge(self, plan: Plan) -> None:
        """The plan is in flight no more: what it named may be reused, or found."""
        self.pool.release(plan.arms.id.tolist())
        self.pool.release(t.snapshot_id for t in plan.admissions if t.snapshot_id)

    def check(self, in_flight: Iterable[Plan]) -> None:
        """Assert that every id is free, cached, or named by a plan in flight."""
        armed = [plan.arms.id.tolist() for plan in in_flight]
        restored = [[t.snapshot_id for t in plan.admissions if t.snapshot_id] for plan in in_flight]
        self.pool.check([*armed, *restored])


def _interval(limits: Limits) -> int:
    """Tokens between snapshots of a request that decodes.

    At least what all plans in flight may commit, so that they can come to one length at most.
    """
    in_flight = (limits.pipeline_depth + 1) * (limits.max_draft_tokens + 1)
    return -(-max(limits.snapshot_interval, in_flight) // limits.block_size) * limits.block_size


def _ids_in_flight(in_flight: Iterable[Plan]) -> dict[tuple[int, int], int]:
    """Ids that plans in flight may take, by slot and length."""
    ids: dict[tuple[int, int], int] = {}
    for plan in in_flight:
        armed = plan.slot[plan.arms.row].tolist(), plan.arms.length.tolist()
        ids |= zip(zip(*armed, strict=True), plan.arms.id.tolist(), strict=True)
    return ids
