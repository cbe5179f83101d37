"""Executes the scheduler's orders to the tiers, beside the steps.

Lines of caches are copied under one lock, in which nothing else waits: neither for a disk nor for a
step. Who takes the lock first decides whether an order that takes too long, or whose epoch is over,
has copied something; after that it copies nothing more. The scheduler lets nothing else use the
lines of an order until its answer, and the step thread looks at every plan whether that is so.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, InvalidStateError

import numpy as np
import torch
from surestep_common.errors import InvalidRequest, Unavailable
from surestep_common.invariants import IntArray, LedgerError, as_bits, of_bits
from surestep_proto import worker_pb2 as pb

from surestep_worker.cache.caches import Caches
from surestep_worker.cache.kv_cache import KVCache

from .crew import Crew
from .entry import Entry, Kind, Name
from .lines import Lines
from .stack import Stack

_CHUNK = 16  # lines that are copied at once
_READERS = 4


class _Job:
    """An order, and what of it is done."""

    def __init__(self, order: pb.TierOrder) -> None:
        self.order = order
        self.void = False  # it copies nothing more
        self.answered = Future[pb.TierAnswer]()
        self.whole = np.zeros(len(order.keys), dtype=np.bool_)
        self.drafted = np.zeros(len(order.keys), dtype=np.bool_)
        self.snapshots = np.zeros(len(order.snapshot_keys), dtype=np.bool_)
        self.blocks = np.array(order.blocks[:], dtype=np.int64)
        self.ids = np.array(order.snapshot_ids[:], dtype=np.int64)

    def fail(self, error: BaseException) -> None:
        """End an order with an error, unless it has ended or no task waits for it."""
        with contextlib.suppress(InvalidStateError):
            self.answered.set_exception(error)

    def answer(self) -> pb.TierAnswer:
        return pb.TierAnswer(
            epoch=self.order.epoch,
            number=self.order.number,
            blocks=as_bits(self.whole),
            drafted=as_bits(self.drafted),
            snapshots=as_bits(self.snapshots),
        )


class Moves:
    """Orders of one rank."""

    def __init__(self, caches: Caches, open_stack: Callable[[], Stack]) -> None:
        """`open_stack` is called once the rank's weights have their name."""
        self._kv, self._recurrent, self._held = caches.kv, caches.recurrent, caches.held
        self._blocks = Lines(pages_of(caches.kv))
        states = self._recurrent.snapshot_tensors if self._recurrent is not None else []
        self._states = Lines(states)
        self._open_stack = open_stack
        self._stack: Stack | None = None
        self._epoch = 0
        self._jobs = dict[int, _Job]()
        self._moving: frozenset[int] = frozenset()  # blocks of orders that are not answered
        self._loading: frozenset[int] = frozenset()  # of them, those that are written
        self._lock = threading.Lock()
        self._looking = Crew(_READERS, "tier-look")
        self._reading = Crew(_READERS, "tier-read")
        self._storing = Crew(1, "tier-store")

    # -- from the step thread ------------------------------------------------------------------

    def fence(self) -> None:
        """End all orders: nothing is copied for them when this returns."""
        with self._lock:
            self._epoch = 0
            ended, self._jobs = list(self._jobs.values()), {}
            self._hold()
            for job in ended:
                job.void = True
        for job in ended:
            job.fail(Unavailable("the epoch of this order is over"))

    def begin(self, epoch: int) -> None:
        """Take orders of this epoch, whose first plan was applied."""
        with self._lock:
            self._stack = self._stack or self._open_stack()
            self._epoch = epoch

    def check(self, block_ids: IntArray, num_cached: int) -> None:
        """Raise LedgerError if a plan has blocks written that are moving, or goes on from some that
        are being loaded: all but the first `num_cached` are written."""
        if not self._moving:
            return
        cached, written = block_ids[:num_cached].tolist(), block_ids[num_cached:].tolist()
        if not (self._loading.isdisjoint(cached) and self._moving.isdisjoint(written)):
            raise LedgerError("the plan names blocks that an order to the tiers holds")

    def close(self, timeout_s: float) -> None:
        """Return when everything that was ordered is done and written, or the time is over."""
        for threads in (self._looking, self._storing, self._reading):
            threads.close(timeout_s)
        if self._stack is not None:
            self._stack.close(timeout_s)

    # -- from the event loop -------------------------------------------------------------------

    def submit(self, order: pb.TierOrder) -> Future[pb.TierAnswer]:
        """Begin with an order. Raises InvalidRequest, LedgerError, Unavailable."""
        self._check_order(order)
        job = _Job(order)
        with self._lock:
            if order.epoch != self._epoch:
                raise Unavailable(f"epoch {order.epoch} takes no orders to the tiers")
            if order.number in self._jobs or not self._moving.isdisjoint(order.blocks):
                raise LedgerError(f"order {order.number} to the tiers names what another one holds")
            self._jobs[order.number] = job
            self._hold()
        work, thread = {
            pb.LOOK_UP: (self._look_up, self._looking),
            pb.LOAD: (self._load, self._looking),
            pb.STORE: (self._store, self._storing),
            pb.FORGET: (self._forget, self._storing),
        }[order.action]
        thread.submit(self._run, work, job)
        return job.answered

    def give_up(self, number: int) -> None:
        """Answer an order with what of it is done by now."""
        job = self._jobs.get(number)
        if job is not None:
            self._answer(job)

    def _hold(self) -> None:
        orders = [job.order for job in self._jobs.values()]
        self._moving = frozenset(block for order in orders for block in order.blocks)
        loads = (order for order in orders if order.action == pb.LOAD)
        self._loading = frozenset(block for order in loads for block in order.blocks)

    def _check_order(self, order: pb.TierOrder) -> None:
        copies = order.action in (pb.LOAD, pb.STORE)
        num_blocks = self._kv.num_blocks
        num_snapshots = self._recurrent.num_snapshots if self._recurrent is not None else 0
        blocks, snapshots = len(order.keys), len(order.snapshot_keys)
        holds = (
            order.action in (pb.LOOK_UP, pb.LOAD, pb.STORE, pb.FORGET),
            len(order.groups) == blocks,
            len(order.blocks) == (blocks if copies else 0),
            len(set(order.blocks)) == len(order.blocks),
            all(0 < block < num_blocks for block in order.blocks),
            all(group < len(self._kv.layout.windows) for group in order.groups),
            len(order.drafted) == (-(-blocks // 8) if order.action == pb.STORE else 0),
            len(order.snapshot_lens) == snapshots,
            len(order.snapshot_ids) == (snapshots if copies else 0),
            len(set(order.snapshot_ids)) == len(order.snapshot_ids),
            all(0 < snapshot <= num_snapshots for snapshot in order.snapshot_ids),
            all(16 <= len(key) <= 20 for key in (*order.keys, *order.snapshot_keys)),
        )
        if not all(holds):
            raise InvalidRequest("an order to the tiers cannot be", param="action")

    # -- on threads of their own ---------------------------------------------------------------

    def _run(self, work: Callable[[_Job, Stack], None], job: _Job) -> None:
        try:
            if not job.void and self._stack is not None:
                work(job, self._stack)
        except BaseException as error:  # noqa: BLE001  # it ends the stream
            job.fail(error)
            return
        self._answer(job)

    def _answer(self, job: _Job) -> None:
        """Answer an order, for which nothing is copied from now on."""
        with self._lock:
            fenced, job.void = job.void, True
            if self._jobs.pop(job.order.number, None) is None or fenced:
                return
            self._hold()
        with contextlib.suppress(InvalidStateError):  # no task waits for it
            job.answered.set_result(job.answer())

    def _look_up(self, job: _Job, stack: Stack) -> None:
        keys = job.order.keys
        job.drafted[:] = stack.present([Name(Kind.DRAFTED, key) for key in keys])
        job.whole[:] = stack.present([Name(Kind.BLOCK, key) for key in keys])
        job.whole |= job.drafted
        job.snapshots[:] = stack.present(_snapshot_names(job.order))

    def _load(self, job: _Job, stack: Stack) -> None:
        def block(key: bytes) -> tuple[Entry | None, bool]:
            for kind in (Kind.DRAFTED, Kind.BLOCK):
                entry = stack.read(Name(kind, key), self._blocks.nbytes)
                if entry is not None:
                    return entry, kind is Kind.DRAFTED
            return None, False

        for rows in _chunks(len(job.whole)):
            reading = [self._reading.submit(block, job.order.keys[row]) for row in rows]
            found = [read.result() for read in reading]
            there = [row for row, (entry, _) in zip(rows, found, strict=True) if entry is not None]
            content = [entry for entry, _ in found if entry is not None]
            drafted = [drafted for entry, drafted in found if entry is not None]
            if not self._fill_blocks(job, there, content, np.array(drafted, dtype=np.bool_)):
                return
        names = _snapshot_names(job.order)
        for row, (name, length) in enumerate(zip(names, job.order.snapshot_lens, strict=True)):
            entry = stack.read(name, self._states.nbytes)
            if entry is not None and entry.tokens == length:
                self._fill_snapshot(job, row, entry)

    def _fill_blocks(
        self, job: _Job, rows: Sequence[int], content: Sequence[Entry], drafted: np.ndarray
    ) -> bool:
        """Copy entries into blocks; return False if nothing is to be copied any more."""
        with self._lock:
            if job.void:
                return False
            if not rows:
                return True
            blocks, held = job.blocks[rows], self._held
            if held is not None:
                held.unseal_lines(blocks, np.zeros(0, dtype=np.int64))
            self._blocks.write(blocks, [entry.payload for entry in content])
            if held is not None:
                held.seal_loaded(blocks, np.array(job.order.groups[:])[rows], drafted)
            job.whole[rows], job.drafted[rows] = True, drafted
        return True

    def _fill_snapshot(self, job: _Job, row: int, entry: Entry) -> None:
        with self._lock:
            if job.void or self._recurrent is None:
                return
            ids, lengths = job.ids[[row]], np.array([entry.tokens])
            if self._held is not None:
                self._held.unseal_lines(np.zeros(0, dtype=np.int64), ids)
            self._states.write(ids - 1, [entry.payload])
            self._recurrent.mark_taken(ids, lengths)
            if self._held is not None:
                self._held.seal_snapshots(ids, lengths)
            job.snapshots[row] = True

    def _store(self, job: _Job, stack: Stack) -> None:
        order, count = job.order, len(job.whole)
        drafted = of_bits(order.drafted, count)
        kinds = [Kind.DRAFTED if drafted[row] else Kind.BLOCK for row in range(count)]
        names = [Name(kind, key) for kind, key in zip(kinds, order.keys, strict=True)]
        for rows in () if job.void else _chunks(count):
            lacking = [row for row in rows if stack.lacks(names[row])]
            job.whole[[row for row in rows if row not in lacking]] = True
            for row, payload in self._contents(job, self._blocks, job.blocks, lacking, drafted):
                entry = stack.pack(names[row], payload)
                job.whole[row] = stack.write(names[row], entry)
                if job.whole[row] and drafted[row]:
                    stack.remove([Name(Kind.BLOCK, order.keys[row])])
        for row, name in enumerate(_snapshot_names(order)):
            if not stack.lacks(name):
                job.snapshots[row] = True
                continue
            for _, payload in self._contents(job, self._states, job.ids, [row], None):
                entry = stack.pack(name, payload, order.snapshot_lens[row])
                job.snapshots[row] = stack.write(name, entry)

    def _contents(
        self,
        job: _Job,
        lines: Lines,
        ids: IntArray,
        rows: Sequence[int],
        drafted: np.ndarray | None,
    ) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield the bytes of some rows' lines; `drafted` [N] of blocks, None for snapshots."""
        if not rows:
            return
        chosen, none = ids[rows], np.zeros(0, dtype=np.int64)
        with self._lock:
            if job.void:
                return
            if self._held is not None and drafted is not None:
                self._held.check_whole(chosen, drafted[rows], none)
            elif self._held is not None:
                self._held.check_whole(none, np.zeros(0, dtype=np.bool_), chosen)
            contents = lines.read(chosen if drafted is not None else chosen - 1)
        yield from zip(rows, contents, strict=True)

    def _forget(self, job: _Job, stack: Stack) -> None:
        names = [Name(kind, key) for key in job.order.keys for kind in (Kind.BLOCK, Kind.DRAFTED)]
        stack.remove([*names, *_snapshot_names(job.order)])


def pages_of(kv: KVCache) -> list[torch.Tensor]:
    """Return all pages [num_blocks, ...] that a block lies in."""
    pages = [page for layer in kv.layers for page in layer.pages if page.numel()]
    return pages + ([kv.hidden.view(kv.num_blocks, -1)] if kv.hidden.numel() else [])


def _snapshot_names(order: pb.TierOrder) -> list[Name]:
    return [Name(Kind.SNAPSHOT, key) for key in order.snapshot_keys]


def _chunks(count: int) -> Iterator[Sequence[int]]:
    return (range(at, min(at + _CHUNK, count)) for at in range(0, count, _CHUNK))
