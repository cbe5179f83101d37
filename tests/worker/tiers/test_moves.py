"""Orders to the tiers of a rank: refused where they cannot be, ended in time, fenced by epoch."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest
import torch
from surestep_common.errors import InvalidRequest, Unavailable
from surestep_common.invariants import LedgerError
from surestep_kernels import load_kernels
from surestep_proto import worker_pb2 as pb
from surestep_worker.cache.cache_memory import CacheMemory
from surestep_worker.cache.caches import Caches
from surestep_worker.cache.held_caches import Books, Grown, HeldCaches
from surestep_worker.cache.kv_cache import KVCache, KVSpec
from surestep_worker.host import shared_memory
from surestep_worker.tiers.entry import Entry, EntryForm, Name
from surestep_worker.tiers.host import HostTier
from surestep_worker.tiers.moves import Moves
from surestep_worker.tiers.stack import Stack

SPEC = KVSpec(windows=(0,), num_kv_heads=1, head_dim=8, block_size=8, dtype=torch.float32)
BLOCKS, EPOCH = 10, 3
KEYS = [bytes([number]) * 16 for number in range(8)]


class Held(HostTier):
    """Memory whose reads wait until they are let go."""

    def __init__(self) -> None:
        super().__init__(1 << 20)
        self.go_on = threading.Event()
        self.go_on.set()
        self.asked = threading.Event()

    def read(self, name: Name) -> Entry | None:
        self.asked.set()
        assert self.go_on.wait(30)
        return super().read(name)


class Rank:
    """A cache of one layer with its tiers, in an epoch that has begun."""

    def __init__(self) -> None:
        memory, kernels = CacheMemory(shared_memory.create("surestep-test")), load_kernels("cpu")
        books = Books.open(memory, BLOCKS, 1)
        self.kv = KVCache(SPEC, BLOCKS, kernels, "cpu", memory)
        self.held = HeldCaches(books, self.kv, None, kernels.digest_pages)
        self.held.verify(b"i" * 32)
        self.near = Held()
        stack = Stack(EntryForm.of("it"), self.near, [])
        self.moves = Moves(Caches(self.kv, None, self.held), lambda: stack)
        self.begin(EPOCH)

    def begin(self, epoch: int) -> None:
        self.moves.fence()
        self.held.begin(pb.StepPlan(epoch=epoch, step=1, planner=5))
        self.moves.begin(epoch)

    def fill(self, *blocks: int) -> None:
        """Write blocks full."""
        self.held.extend(np.array(blocks), 0, 0)
        for block in blocks:
            self.kv.layers[0].k[block] = block
        table = np.array([[blocks]], dtype=np.int32)
        size = len(blocks) * SPEC.block_size
        self.held.seal_blocks(table, np.array([0]), Grown(np.array([0]), np.array([size])))

    def order(self, action: pb.TierAction, /, *blocks: int, **other: Any) -> Future[pb.TierAnswer]:
        """Order something of blocks and the keys of their numbers."""
        self.number = getattr(self, "number", 0) + 1
        drafted = b"\0" * -(-len(blocks) // 8) if action == pb.STORE else b""
        copies = action in (pb.LOAD, pb.STORE)
        what: dict[str, Any] = {
            "keys": [KEYS[block % 8] for block in blocks],
            "groups": [0] * len(blocks),
        }
        what |= {"blocks": blocks if copies else (), "drafted": drafted, "number": self.number}
        what |= {"epoch": EPOCH, "action": action}
        return self.moves.submit(pb.TierOrder(**(what | other)))


@pytest.fixture
def rank() -> Iterator[Rank]:
    made = Rank()
    yield made
    made.near.go_on.set()
    made.moves.close(30)


def found(answer: Future[pb.TierAnswer]) -> int:
    bits: int = answer.result(30).blocks[0]
    return bits


def test_a_block_comes_back_sealed(rank: Rank) -> None:
    rank.fill(3, 4)
    assert found(rank.order(pb.STORE, 3, 4)) == 0b11
    assert found(rank.order(pb.LOOK_UP, 3, 5, 4)) == 0b101
    rank.kv.layers[0].k[:] = -1
    rank.begin(EPOCH + 1)
    with pytest.raises(LedgerError, match="not complete"):
        rank.held.extend(np.array([6]), 1, 0)
    keys = [KEYS[3], KEYS[5], KEYS[4]]
    loaded = rank.order(pb.LOAD, 6, 7, 8, keys=keys, epoch=EPOCH + 1)
    assert found(loaded) == 0b101
    assert rank.kv.layers[0].k[6].eq(3).all()
    assert rank.kv.layers[0].k[8].eq(4).all()
    assert rank.kv.layers[0].k[7].eq(-1).all()
    rank.held.extend(np.array([6, 8]), 2, 0)
    with pytest.raises(LedgerError, match="not complete"):
        rank.held.extend(np.array([7]), 1, 0)


def test_what_is_forgotten_is_not_found(rank: Rank) -> None:
    rank.fill(3)
    rank.order(pb.STORE, 3).result(30)
    rank.order(pb.FORGET, 3).result(30)
    assert found(rank.order(pb.LOOK_UP, 3)) == 0


def test_only_what_is_sealed_and_whole_is_stored(rank: Rank) -> None:
    with pytest.raises(LedgerError, match="not whole"):
        rank.order(pb.STORE, 3).result(30)
    rank.begin(EPOCH)
    rank.fill(3)
    rank.kv.layers[0].v[3, 0, 0, 0] = 1e-30
    with pytest.raises(LedgerError, match="not whole"):
        rank.order(pb.STORE, 3).result(30)


def test_what_comes_too_late_is_not_copied(rank: Rank) -> None:
    rank.fill(3)
    rank.order(pb.STORE, 3).result(30)
    rank.near.go_on.clear()
    slow = rank.order(pb.LOAD, 6, keys=[KEYS[3]])
    assert rank.near.asked.wait(30)
    rank.moves.give_up(rank.number)
    assert found(slow) == 0
    rank.moves.check(np.array([6]), 0)  # it may be used for something else now
    rank.near.go_on.set()
    rank.moves.close(30)
    assert rank.kv.layers[0].k[6].eq(0).all()


def test_orders_end_with_their_epoch(rank: Rank) -> None:
    rank.fill(3)
    rank.order(pb.STORE, 3).result(30)
    rank.near.go_on.clear()
    slow = rank.order(pb.LOAD, 6, keys=[KEYS[3]])
    rank.begin(EPOCH + 1)
    with pytest.raises(Unavailable):
        slow.result(30)
    rank.near.go_on.set()
    rank.moves.close(30)
    assert rank.kv.layers[0].k[6].eq(0).all()
    with pytest.raises(Unavailable, match="takes no orders"):
        rank.order(pb.LOOK_UP, 3)


def test_plans_leave_moving_blocks_alone(rank: Rank) -> None:
    rank.near.go_on.clear()
    rank.order(pb.LOAD, 6, 7)
    for blocks, cached in (([6], 0), ([6], 1), ([5, 7], 1)):
        with pytest.raises(LedgerError, match="holds"):
            rank.moves.check(np.array(blocks), cached)
    rank.moves.check(np.array([5, 8]), 1)
    with pytest.raises(LedgerError, match="another one holds"):
        rank.order(pb.LOAD, 7)


@pytest.mark.parametrize(
    "change",
    [
        {"blocks": [BLOCKS]},
        {"blocks": [0]},
        {"blocks": [1, 2]},
        {"blocks": []},
        {"groups": [1]},
        {"groups": []},
        {"keys": [b"short"]},
        {"keys": [b"k" * 21]},
        {"drafted": b"\0"},
        {"action": pb.STORE},
        {"action": pb.LOOK_UP},
        {"action": 0},
        {"action": 17},
        {"snapshot_keys": [KEYS[0]], "snapshot_lens": [8], "snapshot_ids": [1]},
        {"snapshot_lens": [8]},
    ],
)
def test_orders_that_cannot_be(rank: Rank, change: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest):
        rank.order(pb.LOAD, 1, **change)


def test_the_rank_leaves_nothing_open(rank: Rank) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        rank.order(pb.LOOK_UP, 1).result(30)
    assert len(os.listdir("/proc/self/fd")) <= before
