"""Proto columns as numpy arrays: the only file of the worker that reads a StepPlan's rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from surestep_common.errors import InvalidRequest
from surestep_common.invariants import consumes_known
from surestep_proto import engine_pb2 as pb

_MODES = frozenset((pb.PREFILL, pb.PREFILL_LAST, pb.DECODE, pb.VERIFY, pb.POOL))

IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Rows:
    """The rows of one step, one array per column of the plan. All arrays are [R]."""

    slot: IntArray
    slot_epoch: IntArray
    mode: IntArray  # values of pb.DecodeMode
    num_tokens: IntArray
    len_lo: IntArray
    len_hi: IntArray
    k_cap: IntArray
    accepted_step: IntArray
    accepted: IntArray
    depends_on_step: IntArray
    catch_up: IntArray

    @classmethod
    def none(cls) -> Rows:
        """No rows."""
        return cls(*np.zeros((len(fields(cls)), 0), dtype=np.int64))

    def __len__(self) -> int:
        return len(self.slot)

    def columns(self) -> Iterator[tuple[str, IntArray]]:
        """Each by its name."""
        return ((column.name, getattr(self, column.name)) for column in fields(self))

    @cached_property
    def is_prefill(self) -> BoolArray:
        """Rows that consume known tokens named by `num_tokens`."""
        return consumes_known(self.mode)

    @cached_property
    def is_sampled(self) -> BoolArray:
        """Rows that choose at least one token."""
        mask: BoolArray = (self.mode != pb.PREFILL) & (self.mode != pb.POOL)
        return mask


class ArmedSnapshots(NamedTuple):
    """Snapshots to take when a slot's state has advanced to exactly `length` tokens. All [N]."""

    slot: IntArray
    length: IntArray
    id: IntArray  # 1..num_snapshots


NOTHING_ARMED = ArmedSnapshots(*np.zeros((3, 0), dtype=np.int64))


def read_snapshots(plan: pb.StepPlan, num_snapshots: int) -> ArmedSnapshots:
    """Snapshots that `plan` arms. Raises InvalidRequest for columns or ids that make no sense."""
    if not plan.snapshot_ids and not plan.snapshot_slots and not plan.snapshot_lens:
        return NOTHING_ARMED
    armed = ArmedSnapshots(
        _column(plan.snapshot_slots), _column(plan.snapshot_lens), _column(plan.snapshot_ids)
    )
    if len({len(column) for column in armed}) > 1:
        raise InvalidRequest("snapshot columns are not parallel", param="snapshot_slots")
    if not set(plan.snapshot_slots) <= set(plan.slot):
        raise InvalidRequest("a snapshot of a slot without a row", param="snapshot_slots")
    if len(set(plan.snapshot_slots)) != len(armed.slot):
        raise InvalidRequest("a slot has more than one snapshot", param="snapshot_slots")
    if not all(0 < x <= num_snapshots for x in plan.snapshot_ids):
        raise InvalidRequest("a snapshot id that does not exist", param="snapshot_ids")
    return armed


def read_rows(plan: pb.StepPlan) -> Rows:
    """Rows of `plan`. Raises InvalidRequest when columns differ in length or a mode is unknown."""
    rows = Rows(
        slot=_column(plan.slot),
        slot_epoch=_column(plan.slot_epoch),
        mode=_column(plan.mode),
        num_tokens=_column(plan.num_tokens),
        len_lo=_column(plan.len_lo),
        len_hi=_column(plan.len_hi),
        k_cap=_column(plan.k_cap),
        accepted_step=_column(plan.accepted_step),
        accepted=_column(plan.accepted),
        depends_on_step=_column(plan.depends_on_step),
        catch_up=_column(plan.catch_up),
    )
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
