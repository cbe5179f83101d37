"""Proto columns as numpy arrays: the only file of the worker that reads a StepPlan's rows."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import numpy as np
from surestep_common.errors import InvalidRequest
from surestep_common.invariants import BoolArray, IntArray
from surestep_common.plan_rows import PlanRows
from surestep_proto import worker_pb2 as pb

__all__ = [
    "NO_SNAPSHOTS",
    "BoolArray",
    "IntArray",
    "Rows",
    "SnapshotRequests",
    "most_tokens",
    "read_rows",
    "read_snapshots",
]

_MODES = frozenset((pb.PREFILL, pb.PREFILL_LAST, pb.DECODE, pb.VERIFY, pb.POOL))

Rows = PlanRows


class SnapshotRequests(NamedTuple):
    """Snapshots to take when a slot's state has advanced to exactly `length` tokens. All [N]."""

    slot: IntArray
    length: IntArray
    id: IntArray  # 1..num_snapshots


NO_SNAPSHOTS = SnapshotRequests(*np.zeros((3, 0), dtype=np.int64))


def read_snapshots(plan: pb.StepPlan, num_snapshots: int) -> SnapshotRequests:
    """Return the snapshots that `plan` requests. Raises InvalidRequest for inconsistent ones."""
    if not plan.snapshot_ids and not plan.snapshot_slots and not plan.snapshot_lens:
        return NO_SNAPSHOTS
    requested = SnapshotRequests(
        _column(plan.snapshot_slots), _column(plan.snapshot_lens), _column(plan.snapshot_ids)
    )
    if len({len(column) for column in requested}) > 1:
        raise InvalidRequest("snapshot columns are not parallel", param="snapshot_slots")
    if not set(plan.snapshot_slots) <= set(plan.slot):
        raise InvalidRequest("a snapshot of a slot without a row", param="snapshot_slots")
    if len(set(plan.snapshot_slots)) != len(requested.slot):
        raise InvalidRequest("a slot has more than one snapshot", param="snapshot_slots")
    if not all(0 < x <= num_snapshots for x in plan.snapshot_ids):
        raise InvalidRequest("a snapshot id that does not exist", param="snapshot_ids")
    return requested


def read_rows(plan: pb.StepPlan) -> Rows:
    """Return the rows of `plan`.

    Raises InvalidRequest when columns differ in length, a slot has two rows or a mode is unknown.
    """
    rows = Rows(**{name: _column(getattr(plan, name)) for name in Rows.names()})
    for name, column in rows.columns():
        if len(column) != len(rows):
            raise InvalidRequest(f"plan column {name} is not parallel to slot", param=name)
    if len(set(plan.slot)) != len(rows):
        raise InvalidRequest("a slot has more than one row", param="slot")
    if not _MODES.issuperset(plan.mode):
        raise InvalidRequest("unknown or unsupported decode mode", param="mode")
    return rows


def _column(values: object) -> IntArray:
    try:
        return np.array(values, dtype=np.int64)
    except OverflowError:
        raise InvalidRequest("a number of the plan has more than 63 bits") from None


def most_tokens(rows: Rows) -> int:
    """Return how many tokens a step of these rows has at most: all that may be drafted."""
    num_decodes = len(rows) - int(rows.is_prefill.sum())
    return num_decodes + int(rows.num_tokens.sum() + rows.max_drafts.sum())


def without_drafts(rows: Rows) -> Rows:
    """Return rows that neither draft nor catch up."""
    nothing = np.zeros_like(rows.max_drafts)
    return dataclasses.replace(rows, max_drafts=nothing, max_proposed=nothing, catch_up=nothing)
