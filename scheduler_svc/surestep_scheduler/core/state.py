"""Everything the policy decides about: requests, slots, blocks and the plans in flight."""

from __future__ import annotations

import secrets
from bisect import insort
from collections import deque
from itertools import count
from typing import NamedTuple

import numpy as np
from surestep_common.errors import InvalidRequest

from surestep_scheduler.cache import prefix
from surestep_scheduler.cache.blocks import BlockPool
from surestep_scheduler.cache.log import CacheLog
from surestep_scheduler.cache.prefix import SnapshotCache
from surestep_scheduler.cache.tiers import Action, BlockLine, SnapshotLine, TierBooks
from surestep_scheduler.speculation.speculation import Speculation

from .audit import audit
from .counters import Counters
from .limits import Limits
from .messages import Freed, Kept, Plan
from .poison import CANARY, NonFiniteWatch, PoisonSearch
from .queue import Tenants, WaitingQueue
from .sequence import Adapter, Request, Sequence, Tenancy
from .slots import Lookup, SlotTable, Tables, cached_prefix, fresh_blocks


class Replay(NamedTuple):
    """Requests that a fence sends back to the queue."""

    num_requests: int
    num_tokens: int  # that they had, prompts included


class SchedulerState:
    """Slots and blocks are reused only after every plan with their tenant is acknowledged."""

    def __init__(self, limits: Limits, log: CacheLog | None = None) -> None:
        self.limits = limits
        self._log = log  # of what is findable in the pool
        self.planner = 1 + secrets.randbits(63)  # by which workers know whose plans they ran
        self.kept: Kept | None = None  # of the epoch before, for the first plan
        self.counters = Counters()
        self.speculation = Speculation()
        self.poison = PoisonSearch()
        self.non_finite = NonFiniteWatch()
        self.epoch = 0
        self.open: dict[str, Sequence] = {}  # by request id: waiting and running
        self.waiting = WaitingQueue()
        self.tenants = Tenants()
        self.running: list[Tenancy] = []  # sorted by order
        self._arrivals = count()
        self._slot_epochs = [0] * limits.num_slots  # newest tenancy of each slot, over all epochs
        self.tiers = TierBooks()
        self.forget_caches()
        self._reset_workers()

    def forget_caches(self) -> None:
        """Begin with empty blocks, and without snapshots."""
        if self._log is not None:
            self._log.cleared()
        self.pool = BlockPool(self.limits.num_blocks, self._log)
        self.snapshots = SnapshotCache(self.limits.usable_snapshots)

    def clear_prefix_cache(self) -> None:
        """Make everything unfindable that blocks and snapshots hold by now."""
        self.pool.clear()
        self.snapshots.pool.clear()

    def _reset_workers(self) -> None:
        """Begin an epoch, in which nothing but blocks and snapshots is on the workers."""
        limits = self.limits
        self.slots = SlotTable(limits.num_slots, len(limits.kv_windows))
        self.tables = Tables(limits.groups, self.pool, self.slots)
        self.speculation.reset(
            limits.num_slots,
            limits.costs,
            adaptive=limits.adaptive_draft_length,
            drafter_has_state=limits.drafter_has_state,
            drafter_looks_up=limits.drafter_looks_up,
        )
        # Ids at which some request of this epoch stops: few, so that few tokens need a closer look.
        self.stop_ids = np.zeros(limits.vocab_size, dtype=np.bool_)
        self.free_slots = list(range(limits.num_slots - 1, -1, -1))
        self.quarantine: list[Tenancy] = []
        self.freed: list[Freed] = []  # for the next plan
        self.in_flight: deque[Plan] = deque()
        self.planned_step = 0
        self.applied_step = 0
        self.drafter_faults = 0  # that the workers have reported
        self.missed_kind = 0  # of step, that the next plan has the workers capture

    # -- requests ------------------------------------------------------------------------------

    @property
    def asked_for(self) -> list[Sequence]:
        """Open requests of clients; the scheduler's own canary is none."""
        return [seq for seq in self.open.values() if seq.request.id != CANARY]

    def uses(self, adapter: Adapter) -> bool:
        """Return whether a request has an adapter, or a plan in flight names it."""
        left = (tenancy.seq for tenancy in self.quarantine)
        return any(seq.request.adapter == adapter for seq in (*self.open.values(), *left))

    def add(self, request: Request, now: float) -> Sequence:
        """Queue a request. Raises InvalidRequest, RequestTooLarge or QueueFull."""
        return self.enqueue(self.sequence(request, now), now)

    def sequence(self, request: Request, now: float) -> Sequence:
        """Make a sequence that may be queued. Raises InvalidRequest or RequestTooLarge."""
        return Sequence.of(request, self.limits, next(self._arrivals), now)

    def enqueue(self, seq: Sequence, now: float) -> Sequence:
        """Queue a sequence. Raises InvalidRequest or QueueFull."""
        request = seq.request
        if request.id in self.open:
            raise InvalidRequest(f"request '{request.id}' is open already", param="request_id")
        self.check_room(seq, now)
        seq.tenant = self.tenants.join(request.tenant, request.weight)
        self.open[request.id] = seq
        self.waiting.add(seq, self.tenants.level)
        return seq

    def check_room(self, seq: Sequence, now: float) -> None:
        """Raise QueueFull if the queue has no room for a sequence.

        A request that has delivered tokens already is not turned away.
        """
        request = seq.request
        if not request.emitted_ids and request.id != CANARY:
            tenant = self.tenants.known(request.tenant)
            self.waiting.check_room(len(seq.tokens), tenant, request.weight, self.limits, now)

    def abort(self, seq: Sequence) -> None:
        """Drop an open request. Its results in flight will be ignored."""
        self.counters.aborted_requests += 1
        self.end(seq, "abort")

    def end(self, seq: Sequence, reason: str) -> None:
        """Forget a request, wherever it is. Canaries count apart."""
        if seq.request.id != CANARY:
            self.counters.finished[reason] += 1
        else:
            self.counters.canary_tokens += len(seq.tokens) - seq.prompt_len
            if reason in ("length", "pooled"):
                self.counters.canaries += 1
                self.poison.canary_lived()
        self.poison.close(seq.request.id)
        self.tiers.quests.pop(seq.request.id, None)
        del self.open[seq.request.id]
        if seq.tenancy is not None:
            self.release(seq.tenancy)
        else:
            self.waiting.remove(seq)
        self.tenants.leave(seq.tenant)

    # -- tenancies -----------------------------------------------------------------------------

    @property
    def headroom(self) -> int:
        """Blocks that admissions leave: one in each KV group for each request that runs already."""
        return len(self.running) * len(self.limits.kv_windows)

    def lookup(self, seq: Sequence) -> Lookup:
        """Look up what a waiting request finds in the cache, and which blocks are missing."""
        cached = cached_prefix(seq, self.pool, self.snapshots, self.limits)
        fresh = fresh_blocks(cached, min(len(seq.tokens) + 1, seq.max_len - 1), self.limits)
        revived = sum(self.pool.num_cached(table.blocks) for table in cached.tables)
        missing = sum(fresh) + revived + self.headroom - self.pool.num_available
        return Lookup(cached, fresh, missing)

    def admit(self, seq: Sequence, now: float) -> Tenancy | None:
        """Move a waiting request into a slot with blocks for its tokens, if there is room."""
        found, size = self.lookup(seq), self.limits.block_size
        if not self.free_slots or found.missing > 0:
            return None
        tables, num_cached = found.cached.tables, found.cached.num_blocks
        shape = seq.shape(self.limits, usual=not self.poison.reshapes(seq.request.id))
        for table in tables:
            self.pool.acquire(table.blocks)
        if found.cached.snapshot_id:
            self.snapshots.restore(found.cached.snapshot_id, num_cached)
        drafted = self.pool.num_drafted(tables[0].blocks)
        for table, fresh in zip(tables, found.fresh, strict=True):
            table.blocks += self.pool.allocate(fresh)
        slot = self.free_slots.pop()
        self._slot_epochs[slot] += 1
        tenancy = Tenancy(
            seq=seq,
            slot=slot,
            slot_epoch=self._slot_epochs[slot],
            num_cached=num_cached * size,
            # The first row that is made leaves the output that drafting begins with.
            drafter_len=max(drafted * size - 1, 0),
            snapshot_id=found.cached.snapshot_id,
            tables=tables,
            stop_ids=seq.request.stop_ids,
            max_chunk=shape.max_chunk,
            text_group=seq.request.text_group if self.limits.enable_prefix_caching else 0,
        )
        self.slots.admit(
            tenancy,
            prefill_len=len(seq.tokens),
            max_len=seq.max_len,
            draft_cap=shape.draft_cap,
            forced_cap=shape.forced_cap,
            capacity=[table.end * size for table in tables],
            branch_len=found.cached.branch_len,
            publish_at=tenancy.num_cached + size,
            mark_at=(drafted + 1) * size,
        )
        self.speculation.admit(slot, seq.acceptance_stats, seq.request.writer)
        self.stop_ids[list(tenancy.stop_ids)] = True
        self._start(tenancy, now)
        return tenancy

    def _start(self, tenancy: Tenancy, now: float) -> None:
        seq = tenancy.seq
        self.waiting.remove(seq)
        self.waiting.started(seq, now)
        insort(self.running, tenancy, key=lambda t: t.seq.order)
        seq.tenant.num_running += 1
        seq.tenancy = tenancy
        self.tables.admit(tenancy)
        quest = self.tiers.quests.pop(seq.request.id, None)
        loaded = quest.loaded(tenancy.num_cached) if quest is not None else 0
        if seq.queue_s is None:
            seq.queue_s = now - seq.arrival
            seq.num_cached = tenancy.num_cached
            if seq.request.id != CANARY:
                self.counters.prompt_tokens += seq.prompt_len
                self.counters.prompt_tokens_cached += min(tenancy.num_cached, seq.prompt_len)
                self.counters.prompt_tokens_loaded += min(loaded, seq.prompt_len)
        if self.snapshots.num_ids:
            self.counters.snapshot_queries += 1
            self.counters.snapshot_hits += tenancy.snapshot_id > 0
        if self.limits.enable_prefix_caching:
            self.counters.prefix_cache_queries += len(seq.tokens)
            self.counters.prefix_cache_hits += tenancy.num_cached
        if quest is not None:
            self.counters.tier_queries += len(seq.tokens) - quest.cached_len
            self.counters.tier_hits += loaded

    def release(self, tenancy: Tenancy) -> None:
        """End a tenancy: close its ledger and give slot and blocks back when it is safe."""
        self.slots.close(tenancy.slot)
        self._count(tenancy)
        tenancy.seq.tenancy = None
        self.running.remove(tenancy)
        self.tables.drop(tenancy)
        self.freed.append(Freed(tenancy.slot, tenancy.slot_epoch))
        self.quarantine.append(tenancy)
        self.sweep()

    def _count(self, tenancy: Tenancy) -> None:
        seq, slots, slot = tenancy.seq, self.slots, tenancy.slot
        seq.tenant.num_running -= 1
        seq.computed_len = max(seq.computed_len, int(slots.len_hi[slot]))
        seq.num_steps += int(slots.num_steps[slot])
        seq.num_drafts += int(slots.num_drafts[slot])
        seq.num_accepted += int(slots.num_accepted[slot])
        seq.acceptance_stats = self.speculation.release(slot)

    def sweep(self) -> None:
        """Reuse what no plan in flight touches any more."""
        planned_step = self.slots.planned_step
        for tenancy in [t for t in self.quarantine if planned_step[t.slot] <= self.applied_step]:
            self.quarantine.remove(tenancy)
            self.free_slots.append(tenancy.slot)
            self.pool.release(tenancy.blocks)

    def launch(self, plan: Plan) -> None:
        """Account for a plan that leaves: its rows are in flight, its freed slots are announced."""
        self.freed, self.missed_kind = [], 0
        self.slots.plan(plan.step, plan.rows.slot, plan.width)
        self.planned_step = plan.step
        self.in_flight.append(plan)

    def acknowledge(self, plan: Plan) -> None:
        """Account for the answer to the oldest plan in flight."""
        oldest = self.in_flight.popleft()
        assert oldest is plan
        self.applied_step = plan.step
        if self.snapshots.num_ids:
            for ids in plan.snapshot_ids:
                self.snapshots.release(ids)

    def preempt(self, tenancy: Tenancy, *, displaced: bool = False) -> None:
        """Finish a tenancy; its request waits for a new one, with all its tokens.

        `displaced`: it makes room for the request of another tenant.
        """
        self.release(tenancy)
        tenancy.seq.num_preemptions += 1
        tenancy.seq.num_displaced += displaced
        self.counters.preemptions += 1
        self.counters.displacements += displaced
        self._requeue(tenancy.seq)

    def retry(self, tenancy: Tenancy) -> None:
        """Compute a request again from nothing: what its blocks hold may be wrong."""
        seq = tenancy.seq
        self.pool.withdraw(tenancy.blocks)
        keys = seq.chain.keys(seq.tokens, 0, seq.chain.count(seq.tokens))
        prefix.forget(self.pool, keys, self.limits.groups)
        for key in keys:
            self.snapshots.forget(key)
        if self.limits.has_tiers:
            self._forget_in_tiers(keys)
        self.release(tenancy)
        self._requeue(seq)

    def _forget_in_tiers(self, keys: list[bytes]) -> None:
        groups = range(len(self.limits.kv_windows))
        blocks = (BlockLine(own, g) for g in groups for own in prefix.in_group(g, keys))
        snapshots = (SnapshotLine(key, 1 + i) for i, key in enumerate(keys))
        wanted = snapshots if self.limits.recurrent else ()
        self.tiers.order(Action.FORGET, blocks=tuple(blocks), snapshots=tuple(wanted))

    def _requeue(self, seq: Sequence) -> None:
        seq.prompt_logprobs = None
        self.waiting.add(seq, self.tenants.level)

    # -- epochs --------------------------------------------------------------------------------

    def fence(self) -> Replay:
        """End the epoch: every running request waits again, and no block is in use.

        What the pool knows of blocks is true of the workers that come next if they say so.
        """
        replayed = [tenancy.seq for tenancy in self.running]
        for tenancy in list(self.running):
            self.release(tenancy)
            tenancy.seq.num_replays += 1
            tenancy.seq.replayed_len = len(tenancy.seq.tokens)
            self._requeue(tenancy.seq)
        for plan in list(self.in_flight):
            self.acknowledge(plan)
        self.sweep()
        self.tiers.drop(self.pool, self.snapshots)
        if self._log is not None:
            self._log.cleared()
        self._reset_workers()
        self.counters.replayed_requests += len(replayed)
        return Replay(len(replayed), sum(len(seq.tokens) for seq in replayed))

    def open_epoch(self, epoch: int, limits: Limits, kept: Kept | None = None) -> None:
        """Begin an epoch on fresh workers, after `fence` or at the start.

        They have `kept` what blocks and snapshots held, if they have the sizes of the ones before.
        """
        assert epoch > self.epoch
        assert not self.running
        assert not self.in_flight
        self.epoch = epoch
        self.counters.epochs += 1
        grown = limits.num_slots - len(self._slot_epochs)
        self._slot_epochs += [0] * max(grown, 0)
        self.limits = limits
        if kept is None:
            self.forget_caches()
        else:
            self.pool.retain(kept.blocks, kept.drafted)
            self.snapshots.retain(kept.snapshots, limits.block_size)
            if self._log is not None:
                self._log.tell_again(lambda key: self.pool.lookup(key) is not None)
        self.kept = self._kept_since(kept.epoch) if kept is not None else None
        self._reset_workers()

    def _kept_since(self, epoch: int) -> Kept:
        """Return what is kept of the workers of an earlier epoch."""
        snapshots = self.snapshots.lengths(self.limits.block_size)
        return Kept(epoch, *self.pool.contents(), snapshots)

    @property
    def num_kept(self) -> int:
        """Tokens of requests that wait for their replay, and need not be computed again."""
        replaying = (seq for seq in self.waiting if seq.is_replaying)
        blocks = (self.lookup(seq).cached.num_blocks for seq in replaying)
        return self.limits.block_size * sum(blocks)

    def check(self) -> None:
        """Assert that slots, blocks, queues and ledgers fit together. For tests."""
        audit(self)
