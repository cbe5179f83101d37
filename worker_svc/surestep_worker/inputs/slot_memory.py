"""The slots on the device: one block of words, to which every plan's differences are written."""

from __future__ import annotations

import math

import numpy as np
import torch
from surestep_common.invariants import Int32Array
from surestep_kernels.slot_state import SlotState
from surestep_kernels.write_runs import Runs
from surestep_proto import worker_pb2 as pb

from surestep_worker.ledger.plan import IntArray
from surestep_worker.ledger.plan_bounds import extend_groups
from surestep_worker.ledger.slots import Slots


class SlotMemory:
    """The words behind a SlotState. Lines 0..S-1 belong to slots, line S is the NULL slot."""

    def __init__(self, slots: Slots, device: torch.device) -> None:
        lines = slots.num_slots + 1
        shapes: dict[str, tuple[int, ...]] = dict.fromkeys(SlotState._fields, (lines,))
        shapes["tokens"] = lines, slots.tokens.shape[1]
        groups, _, pages = slots.block_tables.shape
        shapes["block_tables"] = groups, lines, pages
        sizes = [math.prod(shapes[name]) for name in SlotState._fields]
        self.words = torch.zeros(sum(sizes), dtype=torch.int32, device=device)
        parts = self.words.split(sizes)
        self.state = SlotState(
            *(part.view(shapes[name]) for name, part in zip(SlotState._fields, parts, strict=True))
        )
        self._slots = slots
        self._first = {
            name: int(offset)
            for name, offset in zip(SlotState._fields, np.cumsum([0, *sizes[:-1]]), strict=True)
        }
        self._line = {name: shape[-1] if len(shape) > 1 else 1 for name, shape in shapes.items()}
        self._num_lines = lines

    def differences(self, plan: pb.StepPlan) -> Runs[Int32Array] | None:
        """Return what `plan`, already applied to the host's slots, changes on the device."""
        to, runs = list[int](), list[Int32Array]()

        def write(field: str, slot: int, values: IntArray | Int32Array, at: int = 0) -> None:
            to.append(self._first[field] + slot * self._line[field] + at)
            runs.append(np.ascontiguousarray(values, dtype=np.int32))

        def write_table(group: int, slot: int, values: Int32Array, at: int) -> None:
            write("block_tables", group * self._num_lines + slot, values, at)

        slots = self._slots
        admitted = {admission.slot for admission in plan.admissions}
        for slot in sorted(admitted):
            write("tokens", slot, slots.tokens[slot, : slots.known[slot]].numpy())
            for group, tables in enumerate(slots.block_tables):
                write_table(group, slot, tables[slot], 0)
            for name in ("committed", "known", "folded", "drafter_len"):
                write(name, slot, getattr(slots, name)[slot : slot + 1])
        given_back = plan.release_groups, plan.release_slots, plan.release_counts
        appended = extend_groups(plan), plan.extend_slots, plan.extend_counts
        for columns, ends in ((given_back, slots.first_block), (appended, slots.num_blocks)):
            for group, slot, count in zip(*columns, strict=True):
                if slot not in admitted:
                    end = int(ends[group, slot])
                    entries = slots.block_tables[group, slot, end - count : end]
                    write_table(group, slot, entries, end - count)
        return _runs(to, runs) if runs else None

    def no_difference(self) -> Runs[Int32Array]:
        """Return a run that writes what is already there."""
        null_slot = self._slots.num_slots
        return _runs([self._first["known"] + null_slot], [np.zeros(1, dtype=np.int32)])


def _runs(to: list[int], runs: list[Int32Array]) -> Runs[Int32Array]:
    lengths = [len(run) for run in runs]
    cu = np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
    return Runs(np.array(to, dtype=np.int32), cu, np.concatenate(runs), max(lengths))
