"""State that follows the committed length: a drafter's rows and recurrent layers, without tensors.

Written from docs/change/protocol.md alone, so that the scheduler's books meet another reading of it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from support.fakes.model import ROOT, FakeModel, advance
from surestep_proto import sampling_pb2
from surestep_proto import worker_pb2 as pb

KvAt = Callable[["Slot", int], "int | None"]  # what the blocks hold for a position


@dataclass
class Slot:
    """One tenancy as the worker knows it."""

    admission: pb.Admission
    tokens: list[int]  # known
    length: int  # committed
    tables: list[list[int]] = field(default_factory=list)  # by KV group; 0 = given back
    log: dict[int, int] = field(default_factory=lambda: {0: 0})  # step -> accepted
    last_step: int = 0
    status: pb.RowStatus = pb.OK  # once it failed, rows in flight fail too
    drafter_len: int = 0
    states: list[int] = field(default_factory=list)  # KV content of the positions computed here
    folded: int = 0
    state: int = ROOT  # recurrent, after `folded` tokens

    @property
    def tenancy(self) -> tuple[int, int]:
        """Slot index and slot epoch."""
        return self.admission.slot, self.admission.slot_epoch


class DrafterRows:
    """The drafter's layer: a row per position, made of the model's KV there and the next token."""

    def __init__(self, model: FakeModel, kv_at: KvAt) -> None:
        self._model = model
        self._kv_at = kv_at
        self._rows: dict[tuple[int, int], int] = {}  # by block and place in it

    def clear(self, block: int) -> None:
        """The block has a new owner."""
        for place in range(self._model.block_size):
            self._rows.pop((block, place), None)

    def admit(self, slot: Slot) -> None:
        """A tenancy begins with what it shares."""
        slot.drafter_len = slot.admission.drafter_len
        assert slot.drafter_len <= max(slot.admission.num_cached - 1, 0)
        assert self._model.drafter_has_state or not slot.drafter_len

    def run(self, slot: Slot, catch_up: int, *, proposes: bool) -> None:
        """Make up for what the plan says; look at all rows before drafting."""
        if not self._model.drafter_has_state:
            assert not catch_up
            return
        while catch_up and slot.drafter_len < slot.length:
            self._rows[self._place(slot, slot.drafter_len)] = self._row(slot, slot.drafter_len)
            slot.drafter_len += 1
            catch_up -= 1
        if proposes:
            assert slot.drafter_len == slot.length, f"{slot.tenancy} drafts from a state that lags"
            self._look(slot)

    def _look(self, slot: Slot) -> None:
        for position in range(slot.drafter_len):
            stored = self._rows.get(self._place(slot, position))
            assert stored is not None, f"{slot.tenancy} has no drafter row at {position}"
            assert stored == self._row(slot, position), f"{slot.tenancy} at {position}"

    def _row(self, slot: Slot, position: int) -> int:
        kv = self._kv_at(slot, position)
        assert kv is not None
        return advance(kv, slot.tokens[position + 1])

    def _place(self, slot: Slot, position: int) -> tuple[int, int]:
        size = self._model.block_size
        return slot.tables[0][position // size], position % size


class RecurrentStates:
    """One state per slot and the snapshots of it; the KV hash chain stands for the layers."""

    def __init__(self, model: FakeModel) -> None:
        self._model = model
        self._snapshots: dict[int, tuple[int, int]] = {}  # id -> length, state

    @property
    def lengths(self) -> dict[int, int]:
        """Tokens in each snapshot, by id."""
        return {snapshot: length for snapshot, (length, _) in self._snapshots.items()}

    def lose(self, rng: random.Random) -> dict[int, int]:
        """Some snapshots are not whole any more; returns the others' lengths."""
        self.keep([snapshot for snapshot in self._snapshots if rng.random() < 0.8])
        return self.lengths

    def keep(self, ids: Iterable[int]) -> None:
        """These snapshots, and no others, are there in the next epoch."""
        self._snapshots = {snapshot: self._snapshots[snapshot] for snapshot in ids}

    def admit(self, slot: Slot) -> None:
        """A tenancy begins, at zero or from a snapshot."""
        admission = slot.admission
        slot.folded = admission.num_cached
        if not self._model.recurrent:
            assert not admission.snapshot_id
            return
        assert bool(admission.snapshot_id) == bool(slot.folded)
        expected = ROOT
        for token in self._marked(slot)[: slot.folded]:
            expected = advance(expected, token)
        if slot.folded:
            length, slot.state = self._snapshots[admission.snapshot_id]
            assert (length, slot.state) == (slot.folded, expected), f"{slot.tenancy} starts wrong"

    def run(self, slot: Slot, upto: int, arms: list[tuple[int, int]]) -> list[int]:
        """Take the tokens before `upto` into the state; returns the ids of snapshots taken."""
        taken, tokens = [], self._marked(slot)
        while self._model.recurrent and slot.folded < upto:
            slot.state = advance(slot.state, tokens[slot.folded])
            slot.folded += 1
            for length, snapshot in arms:
                if length == slot.folded:
                    self._snapshots[snapshot] = (length, slot.state)
                    taken.append(snapshot)
        return taken

    def _marked(self, slot: Slot) -> list[int]:
        return self._model.mark(slot.tokens, slot.admission.prompt_len)

    def check_plan(self, plan: pb.StepPlan) -> None:
        """Every requested id exists, is requested once, and for a slot that has a row."""
        ids = plan.snapshot_ids
        assert len(ids) == len(set(ids)) == len(plan.snapshot_lens)
        assert all(0 < snapshot <= self._model.num_snapshots for snapshot in ids)
        assert set(plan.snapshot_slots) <= set(plan.slot)
        assert self._model.recurrent or not ids


def arms_of(plan: pb.StepPlan, slot: int) -> list[tuple[int, int]]:
    """(length, id) of the snapshots that a plan arms for a slot."""
    columns = zip(plan.snapshot_slots, plan.snapshot_lens, plan.snapshot_ids, strict=True)
    return [(length, snapshot) for requested, length, snapshot in columns if requested == slot]


def add_logprob(columns: sampling_pb2.LogprobColumns, row: int, token: int, num_top: int) -> None:
    columns.row.append(row)
    columns.token_id.append(token)
    columns.logprob.append(-0.5 - token % 7)
    columns.rank.append(1)
    columns.num_top.append(num_top)
    columns.top_token_ids.extend(range(num_top))
    columns.top_logprobs.extend([-0.5] * num_top)
