"""Tiers behind a FakeEngine: they answer in any order, forget what they like, and fail at random.

What they hold outlives every epoch. A block's content is copied when an order is executed, which is
long after it was given: whatever has become of the block meanwhile is what is stored.
"""

from __future__ import annotations

import random

from support.fakes.engine import FakeEngine, bits
from support.fakes.state import DrafterRows
from surestep_proto import worker_pb2 as pb

Content = tuple[list[int | None], dict[int, int] | None]  # KV, and the drafter's rows by place


class FakeTiers:
    """Executes orders to the tiers of one rank."""

    def __init__(self, engine: FakeEngine, rng: random.Random) -> None:
        self._engine, self._rng = engine, rng
        self._blocks = dict[bytes, Content]()
        self._states = dict[bytes, tuple[int, int]]()
        self.orders = list[pb.TierOrder]()
        self.num_loaded = self.num_stored = 0

    def submit(self, order: pb.TierOrder) -> None:
        """Take an order, which names nothing that another one holds."""
        assert order.epoch == self._engine.epoch
        assert self._engine.step, "an order before the first plan"
        assert self.held(pb.LOAD, pb.STORE).isdisjoint(order.blocks)
        self.orders.append(order)

    def held(self, *actions: int) -> set[int]:
        """Blocks of orders of these kinds."""
        return {b for order in self.orders if order.action in actions for b in order.blocks}

    def check(self, plan: pb.StepPlan, engine: FakeEngine) -> None:
        """No plan names blocks that are loaded, or has some written that are stored."""
        assert self.held(pb.LOAD).isdisjoint(plan.block_ids), "a block that is being loaded"
        before = {block for block in plan.block_ids if block in engine._whole}
        yet = self.held(pb.STORE) & set(plan.block_ids)
        assert yet <= before, "a block that is being stored"

    def execute(self) -> pb.TierAnswer:
        """Execute an order, or do some of it; return its answer."""
        order = self.orders.pop(self._rng.randrange(len(self.orders)))
        does = {pb.LOOK_UP: self._look_up, pb.LOAD: self._load, pb.STORE: self._store}
        work = does.get(order.action, self._forget)
        if self._rng.random() < 0.1:  # out of time
            work = self._nothing
        blocks, drafted, snapshots = work(order)
        return pb.TierAnswer(
            epoch=order.epoch,
            number=order.number,
            blocks=bits(blocks, len(order.keys)),
            drafted=bits(drafted, len(order.keys)),
            snapshots=bits(snapshots, len(order.snapshot_keys)),
        )

    def _succeeds(self) -> bool:
        return self._rng.random() < 0.9

    def _nothing(self, order: pb.TierOrder) -> tuple[set[int], set[int], set[int]]:
        return set(), set(), set()

    def _look_up(self, order: pb.TierOrder) -> tuple[set[int], set[int], set[int]]:
        blocks = {row for row, key in enumerate(order.keys) if key in self._blocks}
        states = {row for row, key in enumerate(order.snapshot_keys) if key in self._states}
        gone = [key for key in order.keys if self._rng.random() < 0.02]
        for key in gone:  # others fill the tiers meanwhile
            self._blocks.pop(key, None)
        return blocks, set(), states

    def _load(self, order: pb.TierOrder) -> tuple[set[int], set[int], set[int]]:
        engine, loaded, drafted, states = self._engine, set[int](), set[int](), set[int]()
        for row, (key, block) in enumerate(zip(order.keys, order.blocks, strict=True)):
            engine._kv[block] = [None] * engine.model.block_size
            engine._drafter_rows.clear(block)
            engine._whole.discard(block)
            engine._drafted.discard(block)
            if key not in self._blocks or not self._succeeds():
                continue
            kv, rows = self._blocks[key]
            engine._kv[block] = list(kv)
            engine._whole.add(block)
            loaded.add(row)
            if rows is not None:
                engine._drafter_rows._rows |= {(block, place): x for place, x in rows.items()}
                engine._drafted.add(block)
                drafted.add(row)
        columns = zip(order.snapshot_keys, order.snapshot_ids, order.snapshot_lens, strict=True)
        for row, (key, snapshot, length) in enumerate(columns):
            if key in self._states and self._succeeds():
                assert self._states[key][0] == length
                engine._states._snapshots[snapshot] = self._states[key]
                states.add(row)
        self.num_loaded += len(loaded)
        return loaded, drafted, states

    def _store(self, order: pb.TierOrder) -> tuple[set[int], set[int], set[int]]:
        engine, stored, states = self._engine, set[int](), set[int]()
        for row, (key, block) in enumerate(zip(order.keys, order.blocks, strict=True)):
            assert block in engine._whole, f"block {block} is stored and not whole"
            if not self._succeeds():
                continue
            rows = None
            if order.drafted[row // 8] >> row % 8 & 1:
                assert block in engine._drafted, f"block {block} has no drafter rows to store"
                rows = _rows_of(engine._drafter_rows, block, engine.model.block_size)
            self._blocks[key] = list(engine._kv[block]), rows
            stored.add(row)
        columns = zip(order.snapshot_keys, order.snapshot_ids, order.snapshot_lens, strict=True)
        for row, (key, snapshot, length) in enumerate(columns):
            assert engine._states.lengths[snapshot] == length
            if self._succeeds():
                self._states[key] = engine._states._snapshots[snapshot]
                states.add(row)
        self.num_stored += len(stored)
        return stored, set(), states

    def _forget(self, order: pb.TierOrder) -> tuple[set[int], set[int], set[int]]:
        for key in order.keys:
            self._blocks.pop(key, None)
        for key in order.snapshot_keys:
            self._states.pop(key, None)
        return set(), set(), set()


def _rows_of(rows: DrafterRows, block: int, size: int) -> dict[int, int]:
    return {place: rows._rows[block, place] for place in range(size)}
