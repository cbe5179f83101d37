"""Plans: their rows as arrays, checked against what this rank has and what its slots know.

Schedulers may be wrong. Whatever a plan says, a rank refuses it or executes it: none of its indices
reaches a tensor unchecked. No other file of the worker reads the rows of a StepPlan.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from surestep_common.errors import InvalidRequest
from surestep_common.invariants import IntArray, KnownSlots, PlanRows, check_plan_rows, require
from surestep_common.request_params import check_labels, check_sampling, check_vocab
from surestep_proto import sampling_pb2
from surestep_proto import worker_pb2 as pb

from .slots import Slots, extend_groups

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
    columns = {name: _column(getattr(plan, name)) for name in Rows.names()}
    if not plan.adapter:
        columns["adapter"] = np.zeros(len(plan.slot), dtype=np.int64)
    rows = Rows(**columns)
    for name, column in rows.columns():
        if len(column) != len(rows):
            raise InvalidRequest(f"plan column {name} is not parallel to slot", param=name)
    if len(set(plan.slot)) != len(rows):
        raise InvalidRequest("a slot has more than one row", param="slot")
    if not _MODES.issuperset(plan.mode):
        raise InvalidRequest("unknown or unsupported decode mode", param="mode")
    return rows


def _column(values: Sequence[int]) -> IntArray:
    try:
        return np.array(values[:], dtype=np.int64)  # of a list: a field takes six times as long
    except OverflowError:
        raise InvalidRequest("a number of the plan has more than 63 bits") from None


def most_tokens(rows: Rows) -> int:
    """Return how many tokens a step of these rows has at most: all that may be drafted."""
    num_decodes = len(rows) - int(rows.is_prefill.sum())
    return num_decodes + int(rows.num_tokens.sum() + rows.max_drafts.sum())


def without_drafts(rows: Rows) -> Rows:
    """Return rows that neither draft nor catch up."""
    nothing = np.zeros_like(rows.max_drafts)
    columns = ("max_drafts", "max_proposed", "max_looked_up", "catch_up")
    return dataclasses.replace(rows, **dict.fromkeys(columns, nothing))


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanBounds:
    """Sizes of one rank."""

    num_slots: int
    max_tokens: int  # that a slot holds
    num_blocks: int  # NULL block included
    num_groups: int  # of the KV cache
    max_blocks_per_slot: int  # of a group
    vocab_size: int
    num_snapshots: int
    headless: bool  # the model has no output head
    num_adapters: int  # places of the pool

    def check(self, plan: pb.StepPlan, blocks_held: IntArray) -> None:
        """Raise InvalidRequest for a plan that is out of bounds.

        `blocks_held` [G, S] counts the blocks of each slot in every KV group before the plan.
        """
        self._check_columns(plan)
        for admission in plan.admissions:
            self._check_admission(admission)
        self._check_blocks(plan, blocks_held.copy())

    def _check_columns(self, plan: pb.StepPlan) -> None:
        _require(len(plan.freed_slots) == len(plan.freed_slot_epochs), "freed_slot_epochs")
        _require(len(plan.extend_slots) == len(plan.extend_counts), "extend_counts")
        _require(sum(plan.extend_counts) == len(plan.block_ids), "block_ids")
        released = len(plan.release_slots)
        _require(released == len(plan.release_groups) == len(plan.release_counts), "release_slots")
        _require(len(plan.extend_groups) in (0, len(plan.extend_slots)), "extend_groups")
        named = (*plan.freed_slots, *plan.extend_slots, *plan.slot, *plan.snapshot_slots)
        _require(max((*named, *plan.release_slots), default=0) < self.num_slots, "slot")
        groups = max((*plan.extend_groups, *plan.release_groups), default=0)
        _require(groups < self.num_groups, "extend_groups")
        extended = list(zip(extend_groups(plan), plan.extend_slots, strict=True))
        given_back = list(zip(plan.release_groups, plan.release_slots, strict=True))
        for column in (plan.freed_slots, extended, given_back):
            _require(len(set(column)) == len(column), "slot")

    def _check_admission(self, admission: pb.Admission) -> None:
        ids = admission.token_ids
        _require(admission.slot < self.num_slots, "slot")
        _require(0 < len(ids) <= self.max_tokens, "token_ids")
        check_vocab("token_ids", ids, self.vocab_size)
        _require(0 < admission.prompt_len <= len(ids), "prompt_len")
        _require(len(ids) <= admission.max_len <= self.max_tokens, "max_len")
        _require(admission.snapshot_id <= self.num_snapshots, "snapshot_id")
        _require(admission.adapter <= self.num_adapters, "adapter")
        _require(admission.pooling in sampling_pb2.Pooling.values(), "pooling")
        check_labels(admission.pooling, admission.label_ids)
        if admission.pooling:
            _require(not admission.HasField("sampling"), "sampling")
            judges = admission.pooling == sampling_pb2.LABEL_LOGITS
            _require(not (self.headless and judges), "pooling")
            check_vocab("label_ids", admission.label_ids, self.vocab_size)
            _require(
                admission.pooling != sampling_pb2.MEAN or not admission.num_cached, "num_cached"
            )
        else:
            _require(not self.headless, "pooling")
            check_sampling(admission.sampling, self.vocab_size)

    def _check_blocks(self, plan: pb.StepPlan, held: IntArray) -> None:
        if not plan.block_ids and not plan.release_slots:
            return
        ids = np.array(plan.block_ids[:], dtype=np.int64)
        _require(not len(ids) or 0 < ids.min() <= ids.max() < self.num_blocks, "block_ids")
        held[:, plan.freed_slots] = 0
        admitted, most = {admission.slot for admission in plan.admissions}, self.max_blocks_per_slot
        for slot, group, count in zip(
            plan.release_slots, plan.release_groups, plan.release_counts, strict=True
        ):
            if slot in admitted:  # its table begins behind them
                held[group, slot] = count
            _require(count <= most, "release_counts")
        for slot, group, count in zip(
            plan.extend_slots, extend_groups(plan), plan.extend_counts, strict=True
        ):
            _require(held[group, slot] + count <= most, "extend_counts")


def _require(holds: bool, column: str) -> None:
    if not holds:
        raise InvalidRequest(f"the plan's {column} cannot be", param=column)


def check_rows(rows: Rows, slots: Slots, *, most_drafts: int, most_proposed: int) -> None:
    """Raise LedgerError when a row contradicts its slot."""
    slot = rows.slot
    held = slots.occupied[slot] & (slots.tenancy[slot] == rows.slot_epoch)
    require(held, slot, "it does not hold tenancy {}", rows.slot_epoch)
    message = f"max_drafts {{}} exceeds {most_drafts}"
    require(rows.max_drafts <= most_drafts, slot, message, rows.max_drafts)
    message = f"max_proposed {{}} exceeds {most_proposed}"
    require(rows.max_proposed <= most_proposed, slot, message, rows.max_proposed)
    message = f"max_looked_up {{}} exceeds {most_proposed}"
    require(rows.max_looked_up <= most_proposed, slot, message, rows.max_looked_up)
    known = KnownSlots(
        length=slots.committed[slot],
        capacity=slots.capacity(slot),
        prefill_len=slots.admitted_len[slot],
        max_len=slots.max_len[slot],
        prompt_len=slots.prompt_len[slot],
        pools=slots.pooling[slot] != sampling_pb2.NO_POOLING,
        logged_accepted=slots.accepted_at(slot, rows.accepted_step),
        last_step=slots.last_step[slot],
        prompt_chunk=slots.prompt_chunk,
        own_adapter=slots.adapter[slot],
    )
    check_plan_rows(rows, known)


def check_caught_up(rows: Rows, slots: Slots) -> None:
    """Raise LedgerError when a row would draft from a drafter's state that lags behind."""
    slot = rows.slot
    upto, length = slots.drafter_len[slot], slots.committed[slot]
    ready = (rows.max_proposed == 0) | (upto == length)
    require(ready, slot, "the drafter is at {} of {} tokens and is to draft", upto, length)
