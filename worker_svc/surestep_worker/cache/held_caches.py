"""Books of blocks and snapshots that outlive their rank, in the memory that these lie in.

What is complete is sealed: with the epoch in which it was, and a digest of its bytes. A block is
sealed once it is full of committed tokens, which nothing writes again before a plan gives it to
another request. Seals hold in the newest epoch alone, whose first plan says which hold on. So a
rank that comes later finds what is whole: sealed in the last epoch that ran, and with the bytes of
its digest.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from surestep_common.errors import InvalidRequest
from surestep_common.invariants import (
    NULL_BLOCK,
    BoolArray,
    Int32Array,
    IntArray,
    LedgerError,
    as_bits,
    of_bits,
)
from surestep_kernels.digest_pages import DigestPages
from surestep_proto import worker_pb2 as pb
from torch import Tensor

from .cache_memory import CacheMemory
from .kv_cache import KVCache
from .recurrent import RecurrentCache

logger = logging.getLogger(__name__)

IDENTITY_BYTES = 32
_HEAD = IDENTITY_BYTES // 8 + 2  # words: the identity, the planner and the epoch

Words = npt.NDArray[np.uint64]


class Books(NamedTuple):
    """Words of shared memory. Lines are blocks or snapshots; epoch 0 is that of no seal."""

    identity: Words
    planner: Words  # [1] of the epoch
    epoch: Words  # [1] the newest one that has run
    blocks: Words  # [2, B] epoch and digest of each seal
    drafted: Words  # [2, B] the same, of the drafter's rows; see HeldCaches.seal_blocks
    groups: Words  # [B] KV group of each sealed block
    snapshots: Words  # [2, S]
    lengths: Words  # [S] tokens in each snapshot

    @classmethod
    def open(cls, memory: CacheMemory, num_blocks: int, num_snapshots: int) -> Books:
        """Map the books at the next place in `memory`."""
        blocks = 2 * num_blocks, 2 * num_blocks, num_blocks
        sizes = _HEAD - 2, 1, 1, *blocks, 2 * num_snapshots, num_snapshots
        words = memory.tensor((sum(sizes),), torch.int64).numpy().view(np.uint64)
        parts = iter(np.split(words, np.cumsum(sizes)[:-1]))
        return cls(
            identity=next(parts),
            planner=next(parts),
            epoch=next(parts),
            blocks=next(parts).reshape(2, -1),
            drafted=next(parts).reshape(2, -1),
            groups=next(parts),
            snapshots=next(parts).reshape(2, -1),
            lengths=next(parts),
        )


class Grown(NamedTuple):
    """Lengths of slots [R], in tokens, before and after a step."""

    before: IntArray
    after: IntArray


class HeldCaches:
    """Seals of one rank. Calls come from the step thread, and from those that copy lines which no
    plan names meanwhile."""

    def __init__(
        self,
        books: Books,
        kv: KVCache,
        recurrent: RecurrentCache | None,
        digest: DigestPages,
    ) -> None:
        hidden = [kv.hidden.view(kv.num_blocks, -1)] if kv.hidden.numel() else []
        pages, drafting = list[Tensor](), list[Tensor]()
        for number, layer in enumerate(kv.layers):
            part = drafting if number in kv.spec.drafting else pages
            part += [page for page in layer.pages if page.numel()]
        states = recurrent.snapshot_tensors if recurrent is not None else []
        self._books = books
        self._block_size = kv.spec.block_size
        self._blocks = _Seals(books.blocks, [*pages, *hidden], digest)
        self._drafted = _Seals(books.drafted, drafting, digest)
        self._snapshots = _Seals(books.snapshots, states, digest)

    @property
    def _epoch(self) -> int:
        return int(self._books.epoch[0])

    @property
    def _keeps(self) -> bool:
        """Return whether the scheduler goes on from what outlives a rank."""
        return bool(self._books.planner[0])

    def verify(self, identity: bytes) -> pb.KeptCaches | None:
        """Return what an earlier rank with this `identity` has left whole, if there was one.

        What is not whole loses its seal. Of a rank with another identity nothing is left.
        """
        books = self._books
        if books.identity.tobytes() != identity:
            for part in books:
                part[...] = 0
            books.identity[:] = np.frombuffer(identity, dtype=np.uint64)
            return None
        if not (self._epoch and self._keeps):
            return None
        num_sealed = int((self._blocks.epochs == self._epoch).sum())
        drafted = self._drafted.verify(self._epoch)
        blocks = self._blocks.verify(self._epoch) & (drafted | (books.groups == 0))
        snapshots = self._snapshots.verify(self._epoch)
        ids = np.flatnonzero(snapshots) + 1
        counts = int(blocks.sum()), num_sealed, len(ids), self._epoch
        logger.info("%d of %d blocks and %d snapshots of epoch %d are whole", *counts)
        return pb.KeptCaches(
            planner=int(books.planner[0]),
            epoch=self._epoch,
            blocks=as_bits(blocks),
            drafted=as_bits(drafted & blocks & (books.groups == 0)),
            snapshot_ids=ids.tolist(),
            snapshot_lens=books.lengths[ids - 1].tolist(),
        )

    def begin(self, plan: pb.StepPlan) -> tuple[IntArray, IntArray]:
        """Begin the epoch of its first plan; return snapshots [N] that are kept, and their lengths.

        Raises LedgerError when the plan keeps what is not sealed, or was of another epoch.
        """
        books, kept = self._books, plan.kept
        blocks = drafted = ids = np.zeros(0, dtype=np.int64)
        if plan.HasField("kept"):
            if (kept.planner, kept.epoch) != (books.planner[0], self._epoch):
                raise LedgerError(
                    f"the plan keeps blocks of epoch {kept.epoch}, these are of {self._epoch}"
                )
            num_blocks = books.blocks.shape[1]
            blocks, drafted = (_lines(x, num_blocks) for x in (kept.blocks, kept.drafted))
            ids = np.array(kept.snapshot_ids[:], dtype=np.int64)
            self._check_kept(blocks, drafted, ids, kept.snapshot_lens)
        books.epoch[0] = 0  # no seal holds until all are carried
        self._blocks.carry(blocks, plan.epoch)
        self._drafted.carry(drafted, plan.epoch)
        self._drafted.carry(blocks[books.groups[blocks] > 0], plan.epoch)
        self._snapshots.carry(ids - 1, plan.epoch)
        books.planner[0], books.epoch[0] = plan.planner, plan.epoch
        return ids, books.lengths[ids - 1].astype(np.int64)

    def _check_kept(
        self, blocks: IntArray, drafted: IntArray, ids: IntArray, lengths: Sequence[int]
    ) -> None:
        if len(ids) != len(lengths) or not ((ids > 0) & (ids <= len(self._books.lengths))).all():
            raise InvalidRequest("the plan keeps snapshots that cannot be", param="kept")
        whole = (
            self._blocks.are_sealed(blocks, self._epoch),
            self._drafted.are_sealed(drafted, self._epoch),
            self._snapshots.are_sealed(ids - 1, self._epoch),
            np.array_equal(self._books.lengths[ids - 1], np.array(lengths, dtype=np.uint64)),
        )
        if not all(whole):
            raise LedgerError("the plan keeps blocks or snapshots that are not whole")

    def extend(self, block_ids: IntArray, num_cached: int, num_drafted: int) -> None:
        """Follow the blocks that a table gets: the first of them are cached, others are written.

        Raises LedgerError for a cached one that is not sealed. Plans without a planner may say
        what they like.
        """
        cached, fresh = block_ids[:num_cached], block_ids[num_cached:]
        if self._keeps:
            sealed = self._blocks.are_sealed(cached, self._epoch)
            if not (sealed and self._drafted.are_sealed(cached[:num_drafted], self._epoch)):
                raise LedgerError("the plan goes on from blocks that are not complete")
        self._blocks.epochs[fresh] = self._drafted.epochs[fresh] = 0

    def take(self, snapshot_ids: IntArray) -> None:
        """Follow snapshots that a plan requests: they may be written."""
        self._snapshots.epochs[snapshot_ids - 1] = 0

    def seal_snapshots(self, ids: IntArray, lengths: IntArray) -> None:
        """Seal snapshots that were taken after so many tokens each."""
        if not self._keeps:
            return
        self._books.lengths[ids - 1] = lengths
        self._snapshots.seal(ids - 1, self._epoch)

    def unseal_lines(self, blocks: IntArray, snapshot_ids: IntArray) -> None:
        """Follow blocks and snapshots that are about to be loaded: they are written."""
        self._blocks.epochs[blocks] = self._drafted.epochs[blocks] = 0
        self._snapshots.epochs[snapshot_ids - 1] = 0

    def seal_loaded(self, blocks: IntArray, groups: IntArray, drafted: BoolArray) -> None:
        """Seal blocks that were loaded whole; `drafted`: with the drafter's rows."""
        if not self._keeps:
            return
        self._books.groups[blocks] = groups
        self._blocks.seal(blocks, self._epoch)
        self._drafted.seal(blocks[drafted | (groups > 0)], self._epoch)

    def check_whole(self, blocks: IntArray, drafted: BoolArray, snapshot_ids: IntArray) -> None:
        """Raise LedgerError unless these blocks, perhaps with the drafter's rows, and snapshots are
        sealed and hold the bytes that were.
        """
        beside = drafted | (self._books.groups[blocks] > 0)  # pages that are the model's there
        whole = (
            self._blocks.are_whole(blocks, self._epoch),
            self._drafted.are_whole(blocks[beside], self._epoch),
            self._snapshots.are_whole(snapshot_ids - 1, self._epoch),
        )
        if not all(whole):
            raise LedgerError("blocks or snapshots are to be stored that are not whole")

    def seal_blocks(self, tables: Int32Array, slot: IntArray, grown: Grown) -> None:
        """Seal what is full in the tables [G, S, W] since the committed lengths of slots grew.

        Pages that the drafter writes in blocks of the first group are the model's in others.
        """
        if not self._keeps:
            return
        for group, table in enumerate(tables):
            filled = _filled(table, slot, grown, self._block_size)
            if len(filled):
                self._books.groups[filled] = group
                self._blocks.seal(filled, self._epoch)
            if len(filled) and group:
                self._drafted.seal(filled, self._epoch)

    def seal_drafted(self, tables: Int32Array, slot: IntArray, grown: Grown) -> None:
        """Seal the drafter's rows likewise, which lie in the blocks of the first group."""
        if not self._keeps:
            return
        filled = _filled(tables[0], slot, grown, self._block_size)
        if len(filled):
            self._drafted.seal(filled, self._epoch)


class _Seals:
    """Seals of lines of some pages."""

    def __init__(self, words: Words, pages: Sequence[Tensor], digest: DigestPages) -> None:
        self.epochs, self._digests = words
        self._pages, self._digest = pages, digest

    def seal(self, lines: IntArray, epoch: int) -> None:
        """Seal lines as they are. A process that ends meanwhile leaves them without a seal."""
        self.epochs[lines] = 0
        self._digests[lines] = self._digests_of(lines)
        self.epochs[lines] = epoch

    def are_sealed(self, lines: IntArray, epoch: int) -> bool:
        """Return whether all of these lines are, in this epoch."""
        return bool((self.epochs[lines] == epoch).all())

    def are_whole(self, lines: IntArray, epoch: int) -> bool:
        """Return whether all of these lines are sealed, and hold the bytes that were."""
        sealed = self.are_sealed(lines, epoch)
        return sealed and np.array_equal(self._digests_of(lines), self._digests[lines])

    def carry(self, lines: IntArray, epoch: int) -> None:
        """Let these seals hold in a new epoch."""
        self.epochs[lines] = epoch

    def verify(self, epoch: int) -> BoolArray:
        """Return which lines [L] are sealed in this epoch, and whole or lose their seals."""
        lines = np.flatnonzero(self.epochs == epoch)
        whole = np.zeros(len(self.epochs), dtype=np.bool_)
        whole[lines] = self._digests_of(lines) == self._digests[lines]
        self.epochs[lines[~whole[lines]]] = 0
        return whole

    def _digests_of(self, lines: IntArray) -> Words:
        if not self._pages or not len(lines):
            return np.zeros(len(lines), dtype=np.uint64)
        digests = self._digest(self._pages, torch.from_numpy(lines.astype(np.int64)))
        return digests.numpy().view(np.uint64)


def _filled(table: Int32Array, slot: IntArray, grown: Grown, size: int) -> IntArray:
    """Return the blocks [N] in a table [S, W] that are full since lengths of slots [R] grew."""
    first, end = grown.before // size, grown.after // size
    rows = np.flatnonzero(first < end).tolist()
    found = [table[slot[row], first[row] : end[row]] for row in rows]
    blocks = np.concatenate(found).astype(np.int64) if found else np.zeros(0, dtype=np.int64)
    return np.unique(blocks[blocks != NULL_BLOCK])  # entries that were given back hold none


def _lines(bits: bytes, count: int) -> IntArray:
    """Return the numbers of the bits that are set; raise InvalidRequest for other than `count`."""
    if len(bits) != -(-count // 8):
        raise InvalidRequest("the plan keeps blocks of another cache", param="kept")
    unpacked = of_bits(bits, 8 * len(bits))
    if unpacked[count:].any() or (count and unpacked[NULL_BLOCK]):
        raise InvalidRequest("the plan keeps blocks that do not exist", param="kept")
    return np.flatnonzero(unpacked)
