"""A worker without tensors: full slot bookkeeping around a hash in place of a language model.

The KV content of a position is the hash of all tokens up to it, chained through what is stored in
the blocks. A page that was shared wrongly, overwritten or read too early therefore changes the
tokens, and a shadow table of page owners names the culprit first.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from hashlib import blake2b

import numpy as np
from support.fakes.model import ROOT, Drafter, FakeModel, StatusOf, advance, pooled, ragged
from support.fakes.state import DrafterRows, RecurrentStates, Slot, add_logprob, arms_of
from surestep_common.invariants import (
    DECODE,
    POOL,
    PREFILL,
    PREFILL_LAST,
    VERIFY,
    IntArray,
    KnownSlots,
    PlanRows,
    ResultRows,
    check_plan_rows,
    check_result_rows,
    check_step,
)
from surestep_proto import sampling_pb2
from surestep_proto import worker_pb2 as pb


def column(values: Iterable[int]) -> IntArray:
    return np.array(list(values), dtype=np.int64)


def rows_of(plan: pb.StepPlan) -> PlanRows:
    told = {name: column(getattr(plan, name)) for name in PlanRows.names()}
    if not plan.adapter:
        told["adapter"] = np.zeros_like(told["slot"])
    return PlanRows(**told)


def check_result(
    plan: pb.StepPlan, row: int, counts: tuple[int, ...], *, ok: bool, committed: int, stopped: bool
) -> int:
    """By how many tokens the slot of a row advances; `counts`: drafts, accepted, emitted, looked up."""
    before, drafts, accepted, emitted, found = (column([n]) for n in (committed, *counts))
    no, none = np.array([False]), column([0])
    result = ResultRows(np.array([ok]), no, before, drafts, accepted, emitted, before, none, found)
    planned = PlanRows(**{name: column[row : row + 1] for name, column in rows_of(plan).columns()})
    advance = check_result_rows(
        planned, result, committed=before, ends_with_stop=np.array([stopped])
    )
    return int(advance[0])


def bits(lines: set[int], count: int) -> bytes:
    return bytes(sum(1 << i for i in range(8) if at + i in lines) for at in range(0, count, 8))


def numbers(bits: bytes) -> set[int]:
    return {8 * at + i for at, byte in enumerate(bits) for i in range(8) if byte >> i & 1}


class FakeEngine:
    """Executes plans. Raises LedgerError or AssertionError when a plan breaks the protocol."""

    def __init__(
        self,
        model: FakeModel,
        *,
        drafter: Drafter | None = None,
        status_of: StatusOf | None = None,
        drafter_fails: Callable[[random.Random], bool] = lambda rng: False,
        rank: int = 0,
        seed: int = 0,
    ) -> None:
        self.model, self.rank = model, rank
        self.slots: dict[int, Slot] = {}
        self._drafter = drafter or ragged(0.7)
        self._status_of = status_of or (lambda request_id, known: pb.OK)
        self._drafter_fails = drafter_fails
        self._rng = random.Random(seed)
        self._slot_epochs: dict[int, int] = {}
        self.reset(0)

    def reset(self, epoch: int) -> None:
        """Begin an epoch: no slot survives, and no KV content."""
        self.epoch, self.step, self.slots = epoch, 0, {}
        self._drafter_faults, self._drafter_rests = 0, False
        self._kv: list[list[int | None]] = [
            [None] * self.model.block_size for _ in range(self.model.num_blocks)
        ]
        self._drafter_rows = DrafterRows(self.model, self._kv_at)
        self._states = RecurrentStates(self.model)
        # The tenancy, and the KV group, that may write a block.
        self._owner: dict[int, tuple[int, int, int]] = {}
        self._whole, self._drafted = set[int](), set[int]()  # blocks, and those with drafter rows
        self._planner, self._kept = 0, pb.KeptCaches()  # of the epoch, and of the one before

    def crash(self, epoch: int, rng: random.Random) -> pb.WorkerInfo:
        """Begin an epoch as another process, which has some of what was whole in the last one."""
        last, kv, planner = self.epoch if self.step else 0, self._kv, self._planner
        rows, states, kept = self._drafter_rows, self._states, self._kept
        blocks, drafted = (
            {b for b in x if rng.random() < 0.8} for x in (self._whole, self._drafted)
        )
        self.reset(epoch)
        if not last:  # no plan has come meanwhile: what was kept then is there still
            last, planner, blocks, drafted = kept.epoch, kept.planner, set(), set()
        self._drafter_rows, self._states = rows, states
        for block in range(self.model.num_blocks):
            if block in blocks:
                self._kv[block] = kv[block]
            if block not in drafted & blocks:
                self._drafter_rows.clear(block)
        lengths = self._states.lose(rng)
        self._kept = pb.KeptCaches(
            planner=planner,
            epoch=last,
            blocks=bits(blocks, self.model.num_blocks),
            drafted=bits(blocks & drafted, self.model.num_blocks),
            snapshot_ids=lengths.keys(),
            snapshot_lens=lengths.values(),
        )
        return pb.WorkerInfo(num_blocks=self.model.num_blocks, kept=self._kept)

    def _keep(self, plan: pb.StepPlan) -> None:
        """Begin with what the first plan keeps of the epoch before, and nothing else."""
        kept, held = plan.kept, self._kept
        self._planner = plan.planner
        if plan.HasField("kept"):
            assert plan.planner
            assert (kept.planner, kept.epoch) == (held.planner, held.epoch), "of another epoch"
        snapshots = dict(zip(kept.snapshot_ids, kept.snapshot_lens, strict=True))
        assert snapshots.items() <= self._states.lengths.items(), "snapshots that are not whole"
        self._states.keep(snapshots)
        self._whole, self._drafted = numbers(kept.blocks), numbers(kept.drafted)
        assert self._whole <= numbers(held.blocks), "blocks that are not whole"
        assert self._drafted <= numbers(held.drafted), "drafter rows that are not whole"
        for block in range(self.model.num_blocks):
            if block not in self._whole:
                self._kv[block] = [None] * self.model.block_size
            if block not in self._drafted:
                self._drafter_rows.clear(block)

    def execute(self, plan: pb.StepPlan) -> pb.StepResult:
        """Run one step."""
        assert plan.epoch == self.epoch
        check_step(self.step + 1, plan.step)
        self.step = plan.step
        if plan.step == 1:
            self._keep(plan)
        self._free(plan)
        self._admit(plan)
        self._give_back(plan)
        self._extend(plan)
        result = pb.StepResult(epoch=plan.epoch, step=plan.step, rank=self.rank)
        assert len(set(plan.slot)) == len(plan.slot), "two rows for a slot"
        width = sum(n or 1 + k for n, k in zip(plan.num_tokens, plan.max_drafts, strict=True))
        assert 0 < width <= self.model.max_step_tokens
        self._check_rows(plan)
        self._states.check_plan(plan)
        self._try_drafter(plan, result)
        for row in range(len(plan.slot)):
            self._run_row(plan, row, result)
        result.digest = self._digest(result)
        return result if self.rank == 0 else self._digest_only(result)

    def _free(self, plan: pb.StepPlan) -> None:
        for index, slot_epoch in zip(plan.freed_slots, plan.freed_slot_epochs, strict=True):
            slot = self.slots.pop(index)
            assert slot.admission.slot_epoch == slot_epoch

    def _admit(self, plan: pb.StepPlan) -> None:
        for admission in plan.admissions:
            assert admission.slot not in self.slots, "slot is taken"
            assert admission.slot < self.model.num_slots
            assert admission.slot_epoch > self._slot_epochs.get(admission.slot, 0)
            assert admission.num_cached < len(admission.token_ids)
            self._slot_epochs[admission.slot] = admission.slot_epoch
            slot = Slot(admission, list(admission.token_ids), admission.num_cached)
            slot.tables = [[] for _ in self.model.kv_windows]
            self._drafter_rows.admit(slot)
            self._states.admit(slot)
            self.slots[admission.slot] = slot

    def _give_back(self, plan: pb.StepPlan) -> None:
        columns = plan.release_slots, plan.release_groups, plan.release_counts
        for index, group, count in zip(*columns, strict=True):
            slot, table = self.slots[index], self.slots[index].tables[group]
            first = next((entry for entry, block in enumerate(table) if block), len(table)) + count
            table[:first] = [0] * first
            seen = slot.length + 1 - self.model.kv_windows[group]  # by the next token
            assert 0 < first * self.model.block_size <= seen, f"{slot.tenancy} gives back too much"
            assert self.model.kv_windows[group]

    def _extend(self, plan: pb.StepPlan) -> None:
        start, groups = 0, plan.extend_groups or [0] * len(plan.extend_slots)
        for index, group, count in zip(plan.extend_slots, groups, plan.extend_counts, strict=True):
            for block in plan.block_ids[start : start + count]:
                self._append(self.slots[index], group, block)
            start += count

    def _append(self, slot: Slot, group: int, block: int) -> None:
        assert 0 < block < self.model.num_blocks
        table = slot.tables[group]
        if len(table) * self.model.block_size >= slot.admission.num_cached:
            tables = [(s.tenancy, t) for s in self.slots.values() for t in s.tables]
            holders = [tenancy for tenancy, t in tables if block in t]
            assert not holders, f"block {block} for {slot.tenancy} is still held by {holders}"
            self._owner[block] = (*slot.tenancy, group)
            self._kv[block] = [None] * self.model.block_size
            self._drafter_rows.clear(block)
            self._whole.discard(block)
            self._drafted.discard(block)
        else:
            assert block in self._whole, f"block {block} for {slot.tenancy} is not whole"
        table.append(block)

    def _check_rows(self, plan: pb.StepPlan) -> None:
        slots = [self.slots[index] for index in plan.slot]
        assert [slot.admission.slot_epoch for slot in slots] == list(plan.slot_epoch)
        logged = zip(slots, plan.accepted_step, strict=True)
        known = KnownSlots(
            own_adapter=column(slot.admission.adapter for slot in slots),
            length=column(slot.length for slot in slots),
            capacity=column(min(map(len, slot.tables)) * self.model.block_size for slot in slots),
            prefill_len=column(len(slot.admission.token_ids) for slot in slots),
            max_len=column(slot.admission.max_len for slot in slots),
            prompt_len=column(slot.admission.prompt_len for slot in slots),
            pools=np.array([slot.admission.pooling > 0 for slot in slots]),
            logged_accepted=column(slot.log.get(step, -1) for slot, step in logged),
            last_step=column(slot.last_step for slot in slots),
            prompt_chunk=self.model.prompt_chunk,
        )
        check_plan_rows(rows_of(plan), known)

    def _try_drafter(self, plan: pb.StepPlan, result: pb.StepResult) -> None:
        assert plan.drafter_faults <= self._drafter_faults
        used = VERIFY in plan.mode or any(plan.catch_up)
        if plan.drafter_faults == self._drafter_faults and used:
            self._drafter_faults += self._drafter_fails(self._rng)
        self._drafter_rests = plan.drafter_faults < self._drafter_faults
        result.drafter_faults = self._drafter_faults
        result.drafter_skipped = self._drafter_rests

    def _run_row(self, plan: pb.StepPlan, row: int, result: pb.StepResult) -> None:
        slot, mode = self.slots[plan.slot[row]], int(plan.mode[row])
        before, arms = slot.length, arms_of(plan, plan.slot[row])
        if not self._drafter_rests:
            proposes = plan.max_proposed[row] > 0
            self._drafter_rows.run(slot, plan.catch_up[row], proposes=proposes)
        taken = self._states.run(slot, slot.length, arms)
        drafting = mode == VERIFY and not self._drafter_rests
        finds = drafting and self.model.drafter_looks_up and self._rng.random() < 0.5
        most = (plan.max_looked_up if finds else plan.max_proposed)[row]
        drafts = self._draft(slot, most) if drafting and most else []
        emitted, status = self._window(slot, mode, plan.num_tokens[row], drafts, plan, result, row)
        accepted = max(len(emitted) - 1, 0) if mode == VERIFY else 0
        stop_ids = slot.admission.sampling.stop_token_ids
        stop = next((i for i, token in enumerate(emitted) if token in stop_ids), None)
        if stop is not None:
            emitted = emitted[: stop + 1]
        counts = len(drafts), accepted, len(emitted), len(drafts) * finds
        slot.length += check_result(
            plan, row, counts, ok=status == pb.OK, committed=before, stopped=stop is not None
        )
        if mode in (PREFILL, PREFILL_LAST, POOL):
            taken += self._states.run(slot, slot.length, arms)
        size = self.model.block_size
        for table in slot.tables:
            self._whole.update(filter(None, table[: slot.length // size]))
        self._drafted.update(filter(None, slot.tables[0][: slot.drafter_len // size]))
        slot.tokens += emitted
        slot.log[plan.step] = accepted
        slot.last_step = plan.step
        result.slot.append(plan.slot[row])
        result.slot_epoch.append(plan.slot_epoch[row])
        result.status.append(status)
        result.len_before.append(before)
        result.drafter_len.append(slot.drafter_len)
        result.snapshot_ids_taken.extend(taken if status == pb.OK else [])
        result.n_drafts.append(len(drafts))
        result.n_looked_up.append(counts[-1])
        result.n_accepted.append(accepted)
        result.n_emitted.append(len(emitted))
        result.token_ids.extend(emitted)
        if slot.admission.sampling.want_logprobs:
            for token in emitted:
                add_logprob(result.logprobs, row, token, slot.admission.sampling.num_top_logprobs)

    def _window(
        self,
        slot: Slot,
        mode: int,
        num_tokens: int,
        drafts: list[int],
        plan: pb.StepPlan,
        result: pb.StepResult,
        row: int,
    ) -> tuple[list[int], pb.RowStatus]:
        """Consume the row's tokens. Returns what is emitted, and the row's status."""
        start, sampling = slot.length, slot.admission.sampling
        if slot.status != pb.OK:
            return [], slot.status
        if mode in (PREFILL, PREFILL_LAST, POOL):
            inputs = slot.tokens[start : start + num_tokens]
            if sampling.want_prompt_logprobs:
                end = min(start + num_tokens + 1, slot.admission.prompt_len)
                for token in slot.tokens[start + 1 : end]:
                    num_top = sampling.num_top_prompt_logprobs
                    add_logprob(result.prompt_logprobs, row, token, num_top)
        else:
            assert start + 1 == len(slot.tokens), "decode before the prompt is consumed"
            inputs = [slot.tokens[start], *drafts]
        states = self._forward(slot, start, inputs)
        slot.states += states
        if mode == PREFILL:
            return [], pb.OK
        slot.status = self._status_of(slot.admission.request_id, len(slot.tokens))
        if slot.status != pb.OK:
            return [], slot.status
        if mode == POOL:
            vector = pooled(slot.states, slot.admission.pooling, slot.admission.label_ids)
            result.MergeFrom(pb.StepResult(pooled_rows=[row], pooled=[vector]))
            return [], pb.OK
        if mode in (PREFILL_LAST, DECODE):
            return [self.model.choose(states[-1], sampling)], pb.OK
        emitted = []
        for state, draft in zip(states, [*drafts, None], strict=True):
            emitted.append(self.model.choose(state, sampling))
            if emitted[-1] != draft:
                break
        return emitted, pb.OK

    def _kv_at(self, slot: Slot, position: int, group: int = 0) -> int | None:
        size = self.model.block_size
        return self._kv[slot.tables[group][position // size]][position % size]

    def _forward(self, slot: Slot, start: int, inputs: list[int]) -> list[int]:
        """Write KV for `inputs` at positions start.., reading all that is seen of those before."""
        size, state, states = self.model.block_size, ROOT, list[int]()
        tokens, windows = [*slot.tokens[:start], *inputs], self.model.kv_windows
        tokens = self.model.mark(tokens, slot.admission.prompt_len)
        for position, token in enumerate(tokens[:start]):
            state = advance(state, token)
            for group, window in enumerate(windows):
                if not window or position > start - window:
                    stored = self._kv_at(slot, position, group)
                    assert stored == state ^ group, f"{slot.tenancy} reads foreign KV at {position}"
        for position, token in enumerate(tokens[start:], start):
            state = advance(state, token)
            for group, table in enumerate(slot.tables):
                block, writer = table[position // size], (*slot.tenancy, group)
                assert self._owner.get(block) == writer, f"{writer} writes block {block}"
                self._kv[block][position % size] = state ^ group
            states.append(state)
        return states

    def _draft(self, slot: Slot, max_drafts: int) -> list[int]:
        params = sampling_pb2.SamplingParams(seed=slot.admission.sampling.seed)
        right = self.model.complete(slot.tokens, max_drafts, params, slot.admission.prompt_len)
        drafts = self._drafter(self._rng, right)
        assert len(drafts) <= max_drafts
        return [token % self.model.vocab_size for token in drafts]

    def _digest(self, result: pb.StepResult) -> int:
        lengths = sorted((index, slot.length) for index, slot in self.slots.items())
        content = repr((list(result.token_ids), list(result.n_emitted), lengths)).encode()
        return int.from_bytes(blake2b(content, digest_size=8).digest(), "big")

    def _digest_only(self, result: pb.StepResult) -> pb.StepResult:
        epoch, step, digest = result.epoch, result.step, result.digest
        return pb.StepResult(epoch=epoch, step=step, rank=self.rank, digest=digest)
