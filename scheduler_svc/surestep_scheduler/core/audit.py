"""Check of the scheduler's invariants, which tests make after every event."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .sequence import Tenancy
    from .state import SchedulerState


def audit(state: SchedulerState) -> None:
    """Assert that slots, blocks, queues, tenants and ledgers fit together."""
    held = list(state.tiers.held)
    tables = [t.blocks for t in [*state.running, *state.quarantine]]
    state.pool.check([*tables, *(blocks for blocks, _ in held)])
    named = [ids for plan in state.in_flight for ids in plan.snapshot_ids]
    state.snapshots.check([*named, *(ids for _, ids in held)])
    waiting = {seq.request.id for seq in state.waiting}
    assert state.tiers.quests.keys() <= waiting, "a request asks the tiers and does not wait"
    taken = [t.slot for t in [*state.running, *state.quarantine]]
    assert sorted(taken + state.free_slots) == list(range(state.limits.num_slots)), "slots"
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
