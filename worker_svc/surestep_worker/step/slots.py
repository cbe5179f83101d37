"""Requests by slot, one permanent slot per tenancy: on the host, and as words on the device."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from surestep_common.errors import InternalError
from surestep_common.invariants import NULL_BLOCK, Int32Array, IntArray, chunked_length
from surestep_common.kv_groups import ALL, KVGroups, check_given_back
from surestep_common.request_params import MAX_LABELS
from surestep_kernels.slot_state import SlotState
from surestep_kernels.write_runs import Runs
from surestep_proto import worker_pb2 as pb

from surestep_worker.cache.kv_cache import zero_pages

_LOG_DEPTH = 8  # steps with a row of a slot; more than any pipelining depth


class Slots:
    """Structure of arrays indexed by slot; nothing here is indexed by batch row.

    This is what the host knows without waiting for the device. Steps read and advance a SlotState;
    the tokens here are those of admissions, or all known ones where the two share memory.
    """

    def __init__(
        self,
        num_slots: int,
        max_model_len: int,
        max_draft_tokens: int,
        block_size: int,
        prompt_chunk: int = 1,
        windows: tuple[int, ...] = (ALL,),
    ) -> None:
        self.groups = KVGroups(windows, block_size)
        self.block_size = block_size
        self.prompt_chunk = prompt_chunk  # tokens of a prompt that recurrent layers take at once
        self.num_slots = num_slots
        # One more than the context for the newest token, and room for drafts behind it.
        room = max_model_len + max_draft_tokens + 1
        self.tokens = zero_pages((num_slots, room), torch.int32, "cpu")
        self._tokens = self.tokens.numpy()  # shares memory
        assert NULL_BLOCK == 0
        tables = len(windows), num_slots
        self.block_tables = np.zeros((*tables, -(-room // block_size)), dtype=np.int32)
        self.first_block = np.zeros(tables, dtype=np.int64)  # entries before it were given back
        self.num_blocks = np.zeros(tables, dtype=np.int64)  # entries, these included
        self.tenancy = np.zeros(num_slots, dtype=np.int64)  # newest slot epoch seen
        self.occupied = np.zeros(num_slots, dtype=np.bool_)
        self.committed = np.zeros(num_slots, dtype=np.int64)  # tokens whose KV is valid
        self.known = np.zeros(num_slots, dtype=np.int64)  # tokens whose id is known
        # Columns that rows of padding read too: the last line is that of the NULL slot.
        self.prompt_len = np.zeros(num_slots + 1, dtype=np.int64)
        self.pooling = np.zeros(num_slots + 1, dtype=np.int64)  # pb.Pooling of the prompt
        self.num_labels = np.zeros(num_slots + 1, dtype=np.int64)
        self.label_ids = np.zeros((num_slots + 1, MAX_LABELS), dtype=np.int64)
        self.guided = np.zeros(num_slots + 1, dtype=np.bool_)  # a grammar restricts its tokens
        self.adapter = np.zeros(num_slots, dtype=np.int64)  # its place, plus 1; 0 = none
        self.admitted_len = np.zeros(num_slots, dtype=np.int64)  # tokens known at admission
        self.max_len = np.zeros(num_slots, dtype=np.int64)
        self.folded = np.zeros(num_slots, dtype=np.int64)  # tokens that the recurrent state holds
        self.drafter_len = np.zeros(num_slots, dtype=np.int64)  # positions in the drafter's state
        self.last_step = np.zeros(num_slots, dtype=np.int64)  # newest step that ran this tenancy
        # The worker's half of the double entry: accepted counts of each slot's newest steps.
        self._log_step = np.zeros((num_slots, _LOG_DEPTH), dtype=np.int64)
        self._log_accepted = np.zeros((num_slots, _LOG_DEPTH), dtype=np.int64)

    def share(self, tokens: torch.Tensor) -> None:
        """Use the table [S, W] that steps write for token ids, from now on."""
        self.tokens = tokens
        self._tokens = tokens.numpy()

    def admit(self, admission: pb.Admission) -> None:
        """Start a tenancy. Raises InternalError when the slot is taken or the tenancy is old."""
        slot = admission.slot
        if self.occupied[slot] or admission.slot_epoch <= self.tenancy[slot]:
            raise InternalError(f"slot {slot} cannot start tenancy {admission.slot_epoch}")
        count = len(admission.token_ids)
        if not admission.num_cached < count <= min(admission.max_len, self.tokens.shape[1]):
            raise InternalError(f"slot {slot}: {count} tokens do not fit the admission")
        if admission.drafter_len > max(admission.num_cached - 1, 0):
            raise InternalError(f"slot {slot}: the drafter's state is ahead of the cached prefix")
        self.occupied[slot] = True
        self.tenancy[slot] = admission.slot_epoch
        self._tokens[slot, :count] = admission.token_ids
        self.known[slot] = self.admitted_len[slot] = count
        self.committed[slot] = self.folded[slot] = admission.num_cached
        self.drafter_len[slot] = admission.drafter_len
        self.prompt_len[slot] = admission.prompt_len
        self.max_len[slot] = admission.max_len
        self.pooling[slot] = admission.pooling
        self.adapter[slot] = admission.adapter
        self.num_labels[slot] = num_labels = len(admission.label_ids)
        self.label_ids[slot, :num_labels] = admission.label_ids
        self._clear(slot)
        self.guided[slot] = admission.sampling.HasField("grammar")

    def free(self, slot: int, tenancy: int) -> None:
        """End a tenancy. Raises InternalError when it is not the one that occupies the slot."""
        if not self.occupied[slot] or self.tenancy[slot] != tenancy:
            raise InternalError(f"slot {slot} does not hold tenancy {tenancy}")
        self.occupied[slot] = False
        self._clear(slot)

    def reset(self) -> None:
        """End every tenancy: a new epoch begins and tenancies count from 1 again."""
        self.occupied[:] = False
        self.tenancy[:] = 0
        self._clear(slice(None))

    def give_back(self, slot: int, group: int, count: int) -> None:
        """Forget the first `count` blocks that a table still has, or begin it behind such entries.

        Raises LedgerError when a token behind the committed ones may see one of them.
        """
        begin = self.first_block[group, slot]
        end = begin + count
        check_given_back(self.groups, group, slot, int(end), int(self.committed[slot]))
        self.block_tables[group, slot, begin:end] = NULL_BLOCK
        self.first_block[group, slot] = end
        self.num_blocks[group, slot] = max(self.num_blocks[group, slot], end)

    def extend(self, slot: int, block_ids: IntArray, group: int = 0) -> None:
        begin = self.num_blocks[group, slot]
        self.block_tables[group, slot, begin : begin + len(block_ids)] = block_ids
        self.num_blocks[group, slot] += len(block_ids)

    def num_cached_entries(self, slot: int, group: int) -> tuple[int, int]:
        """Return how many of the next entries of a table hold committed tokens already, and rows
        of the drafter: those of a cached prefix."""
        begin = int(self.num_blocks[group, slot])
        cached = int(self.committed[slot]) // self.block_size - begin
        # The last row is made once more.
        drafted = (int(self.drafter_len[slot]) + 1) // self.block_size - begin
        return max(cached, 0), max(drafted, 0) if group == 0 else 0

    def capacity(self, slot: IntArray) -> IntArray:
        """Return the tokens [R] that the blocks of slots cover."""
        covered: IntArray = self.num_blocks[:, slot].min(axis=0) * self.block_size
        return covered

    def chunked(self, slot: IntArray, start: IntArray, count: IntArray) -> IntArray:
        """Return how many of `count` tokens of prefill rows [R] fill whole chunks of the prompt."""
        if self.prompt_chunk == 1:
            return np.zeros_like(count)
        left = chunked_length(self.prompt_len[slot], self.prompt_chunk) - start
        chunked: IntArray = np.clip(left, 0, count)
        return chunked

    def accepted_at(self, slot: IntArray, step: IntArray) -> IntArray:
        """Return the accepted counts recorded for (slot, step) pairs [R], -1 where none is."""
        hit = self._log_step[slot] == step[:, None]
        counts = np.where(hit, self._log_accepted[slot], -1).max(axis=1)
        return np.where(step == 0, 0, counts)

    def commit(
        self,
        step: int,
        slot: IntArray,
        folded: IntArray,
        consumed: IntArray,
        accepted: IntArray,
        emitted: IntArray,
    ) -> None:
        """Advance slots [R] by their committed tokens; the step has written the emitted ids."""
        self.folded[slot] = folded
        self.committed[slot] += consumed
        self.known[slot] += emitted
        entry = self._log_step[slot].argmin(axis=1)  # the oldest; slots may skip steps
        self._log_step[slot, entry] = step
        self._log_accepted[slot, entry] = accepted

    def ids_at(self, slot: IntArray, position: IntArray) -> IntArray:
        """Return the token ids at positions, elementwise."""
        ids: IntArray = self._tokens[slot, position].astype(np.int64)
        return ids

    def _clear(self, slot: int | slice) -> None:
        self.block_tables[:, slot] = NULL_BLOCK
        self.first_block[:, slot] = self.num_blocks[:, slot] = 0
        self.guided[slot] = False
        self.last_step[slot] = 0
        self._log_step[slot] = 0
        self._log_accepted[slot] = 0


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


def extend_groups(plan: pb.StepPlan) -> Sequence[int]:
    """Return the KV groups of the plan's `extend_slots`."""
    return plan.extend_groups or (0,) * len(plan.extend_slots)


def _runs(to: list[int], runs: list[Int32Array]) -> Runs[Int32Array]:
    lengths = [len(run) for run in runs]
    cu = np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
    return Runs(np.array(to, dtype=np.int32), cu, np.concatenate(runs), max(lengths))
