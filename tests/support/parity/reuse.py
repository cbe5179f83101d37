"""Check that a plan uses nothing again that plans in flight still mean."""

from __future__ import annotations

from surestep_scheduler.core.messages import Plan
from surestep_scheduler.core.state import SchedulerState


def check_reuse(state: SchedulerState, plan: Plan) -> None:
    """Assert that slots, blocks and snapshots of plans in flight are left alone by this one."""
    _nothing_in_flight_is_reused(state, plan)
    _no_snapshot_in_flight_is_reused(state, plan)


def _nothing_in_flight_is_reused(state: SchedulerState, plan: Plan) -> None:
    """Invariant 8. The model worker cannot see it: it runs one step after the other."""
    size = state.limits.block_size
    cached = {
        (t.slot, table.group): max(t.num_cached // size - table.first, 0)
        for t in plan.admissions
        for table in t.tables
    }
    admitted = {t.slot for t in plan.admissions}
    given = {
        block: extend.slot
        for extend in plan.extends
        for block in extend.blocks[cached.get((extend.slot, extend.group), 0) :]
    }
    for earlier in state.in_flight:
        for tenancy in earlier.tenancies if earlier is not plan else ():
            assert tenancy.slot not in admitted, "slot is still in use"
            foreign = [block for block in tenancy.blocks if block in given]
            running = state.slots.open[tenancy.slot]
            assert all(running and given[block] == tenancy.slot for block in foreign)


def _no_snapshot_in_flight_is_reused(state: SchedulerState, plan: Plan) -> None:
    """The same for the ids of snapshots: one prefix each, and none restored while written."""
    named = [
        (int(snapshot), int(slot), int(length))
        for other in state.in_flight
        for slot, length, snapshot in zip(
            other.rows.slot[other.snapshot_requests.row], *other.snapshot_requests[1:], strict=True
        )
    ]
    ids = [snapshot for snapshot, _, _ in set(named)]
    assert len(ids) == len(set(ids)), "one snapshot for two states"
    requested = set(plan.snapshot_requests.id.tolist())
    for other in state.in_flight:
        for tenancy in other.admissions:
            assert tenancy.snapshot_id not in requested, "overwritten before it is restored"
