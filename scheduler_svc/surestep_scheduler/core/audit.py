"""The token ledger, and a check of the scheduler's invariants, which tests make after every event.

Every scheduled token of a tenancy ends accepted, rejected or discarded.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import numpy as np
from surestep_common.invariants import IntArray, LedgerError

if TYPE_CHECKING:
    from surestep_scheduler.core.sequence import Tenancy
    from surestep_scheduler.core.state import SchedulerState


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


def audit(state: SchedulerState) -> None:
    """Assert that slots, blocks, queues, tenants and ledgers fit together."""
    state.pool.check([t.blocks for t in [*state.running, *state.quarantine]])
    state.snapshots.check([ids for plan in state.in_flight for ids in plan.snapshot_ids])
    held = [t.slot for t in [*state.running, *state.quarantine]]
    assert sorted(held + state.free_slots) == list(range(state.limits.num_slots)), "slots"
    state.waiting.check()
    assert state.running == sorted(state.running, key=lambda t: t.seq.order)
    seqs = sorted([*state.waiting, *(t.seq for t in state.running)], key=id)
    assert seqs == sorted(state.open.values(), key=id)
    assert all(seq.tenancy is None for seq in state.waiting)
    _audit_tenants(state)
    _audit_running(state)


def _audit_tenants(state: SchedulerState) -> None:
    state.tenants.check()
    num_open = Counter(seq.tenant.name for seq in state.open.values())
    num_running = Counter(t.seq.tenant.name for t in state.running)
    assert num_open == {tenant.name: tenant.num_open for tenant in state.tenants}
    assert +num_running == {t.name: t.num_running for t in state.tenants if t.num_running}


def _audit_running(state: SchedulerState) -> None:
    slots = state.slots
    for tenancy in state.running:
        assert tenancy.seq.tenancy is tenancy
        slots.check(tenancy.slot)
        committed, known = int(slots.committed[tenancy.slot]), len(tenancy.seq.tokens)
        assert committed <= slots.prefill_len[tenancy.slot] or committed == known - 1
        _audit_tables(state, tenancy, committed)
        assert slots.tenant[tenancy.slot] == tenancy.seq.tenant.index
        pending = sum(
            width
            for plan in state.in_flight
            for row, width in zip(plan.tenancies, plan.width, strict=True)
            if row is tenancy
        )
        assert pending == slots.len_hi[tenancy.slot] - committed, "tokens in flight"


def _audit_tables(state: SchedulerState, tenancy: Tenancy, committed: int) -> None:
    """No KV group keeps what no later position sees, and none has given back more."""
    groups, slots = state.tables.groups, state.slots
    assert len(tenancy.tables) == len(groups.windows)
    for group, (table, window) in enumerate(zip(tenancy.tables, groups.windows, strict=True)):
        assert table.group == group
        assert table.first == groups.first_block(window, committed), "blocks given back"
        assert slots.first_block[group, tenancy.slot] == table.first
        assert slots.capacity[group, tenancy.slot] == table.end * groups.block_size
