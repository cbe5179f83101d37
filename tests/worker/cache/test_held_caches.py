"""What a rank leaves in memory: the next one finds what is whole, of the last epoch alone."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch
from surestep_common.errors import InvalidRequest
from surestep_common.invariants import LedgerError
from surestep_kernels import load_kernels
from surestep_proto import worker_pb2 as pb
from surestep_worker.cache.cache_memory import CacheMemory
from surestep_worker.cache.held_caches import Books, Grown, HeldCaches
from surestep_worker.cache.kv_cache import KVCache, KVSpec
from surestep_worker.checkpoint.held_weights import HeldWeights

SPEC = KVSpec(windows=(0,), num_kv_heads=1, head_dim=8, block_size=8, dtype=torch.float32)
MINE, OTHER = b"mine" * 8, b"other..." * 4
PLANNER, BLOCKS = 5, 10
SLOT = np.array([0])


class Rank:
    """A cache of one layer, and one slot with two blocks."""

    def __init__(self, fd: int, identity: bytes = MINE) -> None:
        memory, kernels = CacheMemory(os.dup(fd)), load_kernels("cpu", "reference")
        books = Books.open(memory, BLOCKS, 3)
        self.kv = KVCache(SPEC, BLOCKS, kernels, "cpu", memory)
        self.held = HeldCaches(books, self.kv, None, kernels.digest_pages)
        self.kept = self.held.verify(identity)

    def begin(self, epoch: int, kept: pb.KeptCaches | None = None, planner: int = PLANNER) -> None:
        self.held.begin(pb.StepPlan(epoch=epoch, step=1, planner=planner, kept=kept))

    def fill(self, *blocks: int) -> None:
        """Write blocks, which are full then."""
        self.held.extend(np.array(blocks), 0, 0)
        for block in blocks:
            self.kv.layers[0].k[block] = block
        self.held.seal_blocks(np.array([[blocks]], dtype=np.int32), SLOT, grown(0, len(blocks)))


def grown(before: int, after: int) -> Grown:
    size = SPEC.block_size
    return Grown(np.array([before * size]), np.array([after * size]))


def found(kept: pb.KeptCaches | None) -> list[int]:
    assert kept is not None
    mask = np.unpackbits(np.frombuffer(kept.blocks, np.uint8), bitorder="little")
    return [int(block) for block in np.flatnonzero(mask)]


@pytest.fixture
def fd() -> int:
    return HeldWeights().fds.caches


@pytest.fixture
def first(fd: int) -> Rank:
    """A rank that has filled two blocks in epoch 1."""
    rank = Rank(fd)
    assert rank.kept is None
    rank.begin(1)
    rank.fill(4, 7)
    return rank


def test_a_successor_finds_what_is_whole(fd: int, first: Rank) -> None:
    second = Rank(fd)
    assert found(second.kept) == [4, 7]
    assert (second.kept.planner, second.kept.epoch) == (PLANNER, 1)  # type: ignore[union-attr]
    assert second.kv.layers[0].k[7].eq(7).all()
    second.begin(2, second.kept)
    assert found(Rank(fd).kept) == [4, 7]


def test_a_block_that_a_plan_gives_away_is_not_whole(fd: int, first: Rank) -> None:
    """Though not a byte of it is written yet."""
    first.held.extend(np.array([4]), 0, 0)
    assert found(Rank(fd).kept) == [7]


def test_other_bytes_are_not_whole(fd: int, first: Rank) -> None:
    first.kv.layers[0].v[4, 0, 3, 5] = 1e-30
    second = Rank(fd)
    assert found(second.kept) == [7]
    first.kv.layers[0].v[4, 0, 3, 5] = 0
    assert found(Rank(fd).kept) == [7]  # its seal is gone


def test_seals_of_earlier_epochs_do_not_hold(fd: int, first: Rank) -> None:
    """Such as those of another scheduler, which has kept nothing: what is in them is not known."""
    second = Rank(fd)
    second.begin(2, planner=PLANNER + 1)
    second.fill(2)
    third = Rank(fd)
    assert found(third.kept) == [2]
    assert third.kept.planner == PLANNER + 1  # type: ignore[union-attr]


def test_a_rank_that_ends_while_an_epoch_begins_keeps_nothing(fd: int, first: Rank) -> None:
    first.held._books.epoch[0] = 0
    assert Rank(fd).kept is None


def test_another_model_finds_nothing(fd: int, first: Rank) -> None:
    assert Rank(fd, OTHER).kept is None
    assert Rank(fd).kept is None


def bits(*blocks: int, count: int = BLOCKS) -> bytes:
    mask = np.zeros(count, dtype=np.bool_)
    mask[list(blocks)] = True
    return np.packbits(mask, bitorder="little").tobytes()


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"planner": PLANNER + 1}, LedgerError),
        ({"epoch": 2}, LedgerError),
        ({"blocks": bits(4, 5)}, LedgerError),
        ({"drafted": bits(4)}, LedgerError),
        ({"snapshot_ids": [1], "snapshot_lens": [8]}, LedgerError),
        ({"snapshot_ids": [4], "snapshot_lens": [8]}, InvalidRequest),
        ({"snapshot_ids": [1]}, InvalidRequest),
        ({"blocks": bits(4)[:1]}, InvalidRequest),
        ({"blocks": bits(0, 4)}, InvalidRequest),
        ({"blocks": bits(4, 12, count=16)}, InvalidRequest),
    ],
)
def test_a_plan_keeps_what_is_whole_or_is_refused(
    fd: int, first: Rank, changes: dict[str, object], error: type[Exception]
) -> None:
    second = Rank(fd)
    empty = bits()
    kept = {"planner": PLANNER, "epoch": 1, "blocks": bits(4, 7), "drafted": empty, **changes}
    with pytest.raises(error):
        second.begin(2, pb.KeptCaches(**kept))  # type: ignore[arg-type]


def test_plans_go_on_from_complete_blocks_alone(fd: int, first: Rank) -> None:
    first.held.extend(np.array([4, 7, 8]), 2, 0)
    for cached, drafted in ((3, 0), (2, 1)):
        with pytest.raises(LedgerError):
            first.held.extend(np.array([4, 7, 8]), cached, drafted)
    second = Rank(fd)
    second.begin(2)
    with pytest.raises(LedgerError):
        second.held.extend(np.array([4]), 1, 0)


def test_caches_go_with_the_weights_they_were_computed_by() -> None:
    held = HeldWeights()
    os.write(held.fds.caches, b"pages")
    held.renew(all_of_it=False)
    assert os.fstat(held.fds.caches).st_size == 5
    held.renew(all_of_it=True)
    assert os.fstat(held.fds.caches).st_size == 0
