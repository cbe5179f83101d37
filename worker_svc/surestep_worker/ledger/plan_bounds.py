"""Whether a plan stays within what this rank has: checked as a whole before any of it is done.

Schedulers may be wrong. Whatever a plan says, a rank refuses it or executes it: none of its indices
reaches a tensor unchecked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from surestep_common.errors import InvalidRequest
from surestep_common.invariants import IntArray
from surestep_common.request_bounds import check_labels
from surestep_common.sampling_ranges import check_sampling, check_vocab
from surestep_proto import sampling_pb2
from surestep_proto import worker_pb2 as pb


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
        ids = np.array(plan.block_ids, dtype=np.int64)
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


def extend_groups(plan: pb.StepPlan) -> Sequence[int]:
    """Return the KV groups of the plan's `extend_slots`."""
    return plan.extend_groups or (0,) * len(plan.extend_slots)


def _require(holds: bool, column: str) -> None:
    if not holds:
        raise InvalidRequest(f"the plan's {column} cannot be", param=column)
