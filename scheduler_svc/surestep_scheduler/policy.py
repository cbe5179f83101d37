"""What the next step does: continuous batching with chunked prefill.

Requests are served in one order, `arrival + priority * priority_aging_s`: a level of priority is
worth that many seconds of waiting, so nobody waits for ever. Requests that decode come first, one
token each; prompts share what is left, each taking at most half of the rest until all had their
turn, so that a short prompt is not kept waiting by long ones. Drafts fill up the budget.
When blocks run out, drafts are given up first, and then the last request in the order.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence as Seq

import numpy as np
from surestep_common.invariants import (
    DECODE,
    PREFILL,
    PREFILL_LAST,
    VERIFY,
    IntArray,
    check_plan_rows,
)

from .drafter import CatchUpBudget
from .messages import Extend, Plan
from .sequence import Sequence, Tenancy
from .state import SchedulerState

_MIN_CHUNK = 32  # tokens: below this a share of a step is not worth a row


def schedule(state: SchedulerState, now: float) -> Plan | None:
    """Plan the next step and account for it in `state`; None when nothing can run before a result.

    `now` is in seconds on the clock of `SchedulerState.add`.
    """
    step = _Step(state)
    ready, prefilling = _split(state)
    prompts = _new_ones_too(list(heapq.merge(prefilling, state.candidates(), key=_order)))
    budget = state.limits.max_num_batched_tokens
    prompt_tokens = sum(_uncomputed(state, seq) for seq in prompts)
    budget -= step.add_decodes(ready, budget, min(prompt_tokens, budget - len(ready)))
    step.add_prefills(prompts, budget, now)
    return step.finish()


def _order(seq: Sequence) -> tuple[float, int]:
    return seq.order


def _new_ones_too(prompts: list[Sequence]) -> list[Sequence]:
    """While requests are computed again after a fault, the first new one has the second turn."""
    if prompts and prompts[0].num_replays:
        new = next((i for i, seq in enumerate(prompts) if not seq.num_replays), 0)
        prompts[1:1] = [prompts.pop(new)] if new else []
    return prompts


def _split(state: SchedulerState) -> tuple[IntArray, list[Sequence]]:
    """Slots that can decode now, and requests whose prompt is not planned to its end.

    A request that everything in flight may bring to its last token but one has to wait.
    """
    slots, slot = state.slots, _slots_of(state.running)
    len_hi = slots.len_hi[slot]
    prefilling = len_hi < slots.prefill_len[slot]
    ready = ~prefilling & (len_hi + 2 <= slots.max_len[slot])
    return slot[ready], [tenancy.seq for tenancy in slots.tenancy[slot[prefilling]]]


def _uncomputed(state: SchedulerState, seq: Sequence) -> int:
    """Prompt tokens that are not planned yet; all of them while it waits."""
    if seq.tenancy is None:
        return len(seq.tokens)
    return int(state.slots.prefill_len[seq.tenancy.slot] - state.slots.len_hi[seq.tenancy.slot])


def _blocks(num_tokens: IntArray, block_size: int) -> IntArray:
    return -(-num_tokens // block_size)


def _slots_of(tenancies: Seq[Tenancy]) -> IntArray:
    return np.array([tenancy.slot for tenancy in tenancies], dtype=np.int64)


class _Step:
    """A plan under construction."""

    def __init__(self, state: SchedulerState) -> None:
        self._state = state
        self._admissions: list[Tenancy] = []
        self._extends: list[Extend] = []
        self._decodes = np.zeros(0, dtype=np.int64)  # slots
        self._caps = np.zeros(0, dtype=np.int64)  # k_cap, parallel to _decodes
        self._caught_up = np.zeros(0, dtype=np.int64)  # catch_up, parallel to _decodes
        self._catch_up = CatchUpBudget(state)
        self._prefills: list[Tenancy] = []
        self._chunks: list[int] = []  # tokens, parallel to _prefills

    def add_decodes(self, slot: IntArray, budget: int, prompt_tokens: int) -> int:
        """One row for each request that decodes; returns the tokens they take.

        While `prompt_tokens` wait, drafts may only have half of what is left.
        """
        if not len(slot):
            return 0
        state, slots = self._state, self._state.slots
        spare = budget - len(slot)
        share = (spare // 2 if prompt_tokens else spare) // len(slot)
        room = slots.max_len[slot] - slots.len_hi[slot] - 2
        caps = np.minimum(np.minimum(slots.draft_cap[slot], room), share)
        caps = state.speculation.lengths(
            slot, caps, slots.len_hi[slot], num_tokens=len(slot) + prompt_tokens
        )
        catch_up = self._catch_up.grant(slot, caps > 0)
        caps[~catch_up.whole] = 0
        covered = slots.capacity[slot] - slots.len_hi[slot] - 1  # drafts that need no new block
        short = np.flatnonzero(caps > covered)
        missing = _blocks(caps[short] - covered[short], state.limits.block_size)
        if missing.sum() <= state.pool.num_available:
            self._extends += state.extend(slot[short], missing)
        else:
            for row in short.tolist():
                caps[row] = self._grow(slot[row : row + 1], int(caps[row]), int(covered[row]))
        kept = slots.open[slot] & (caps >= 0)
        self._decodes, self._caps = slot[kept], caps[kept]
        self._caught_up = catch_up.num_tokens[kept]
        return len(self._decodes) + int(self._caps.sum())

    def _grow(self, slot: IntArray, k: int, covered: int) -> int:
        """Blocks are scarce: drafts are given up for them first, then requests.

        `slot` [1] wants `k` drafts and its blocks cover `covered`; -1 is no room for a row at all.
        Returns the drafts it may have, -1 for no row.
        """
        state = self._state
        while state.slots.open[slot[0]] and k > covered:
            missing = _blocks(np.array([k - covered]), state.limits.block_size)
            if missing[0] <= state.pool.num_available:
                self._extends += state.extend(slot, missing)
                return k
            if k > 0:
                k -= 1
            elif state.quarantine:  # blocks come back with the next result
                return -1
            else:
                # The last in the order. Rows are added in order, so it has none in this plan.
                state.preempt(state.running[-1])
        return k

    def add_prefills(self, prompts: Seq[Sequence], budget: int, now: float) -> None:
        """Chunks for prompts in their order, admitting those that wait while there is room."""
        left, admitting = budget, True
        for seq in prompts:
            if left <= 0:
                break
            tenancy = seq.tenancy
            if tenancy is None:
                tenancy = self._admit(seq, now) if admitting else None
            if tenancy is None:  # those behind must not overtake it
                admitting = False
                continue
            chunk = min(_uncomputed(self._state, seq), max(left // 2, _MIN_CHUNK), left)
            self._prefills.append(tenancy)
            self._chunks.append(chunk)
            left -= chunk
        self._top_up(left)

    def _admit(self, seq: Sequence, now: float) -> Tenancy | None:
        tenancy = self._state.admit(seq, now)
        if tenancy is not None:
            self._admissions.append(tenancy)
            self._extends.append(Extend(tenancy.slot, list(tenancy.blocks)))
        return tenancy

    def _top_up(self, left: int) -> None:
        """Hand out what the shares left over, first come first served."""
        for index, tenancy in enumerate(self._prefills):
            more = min(left, _uncomputed(self._state, tenancy.seq) - self._chunks[index])
            self._chunks[index] += more
            left -= more

    def _prepare_to_draft(self, slot: IntArray) -> IntArray:
        """What the drafter makes up for while prompts [R] are computed."""
        if not len(slot):
            return slot
        drafts = self._state.slots.draft_cap[slot] > 0
        return self._catch_up.grant(slot, drafts & self._state.speculation.expected).num_tokens

    def finish(self) -> Plan | None:
        """Fill the columns, check them, and count the rows as scheduled."""
        state, slots, num_decodes = self._state, self._state.slots, len(self._decodes)
        prefilling = _slots_of(self._prefills)
        slot = np.concatenate((self._decodes, prefilling))
        if not len(slot):
            return None
        k_cap, num_tokens, catch_up = np.zeros((3, len(slot)), dtype=np.int64)
        catch_up[:num_decodes] = self._caught_up
        catch_up[num_decodes:] = self._prepare_to_draft(prefilling)
        k_cap[:num_decodes] = self._caps
        num_tokens[num_decodes:] = self._chunks
        len_hi, prefill_len = slots.len_hi[slot], slots.prefill_len[slot]
        mode = np.where(len_hi + num_tokens == prefill_len, PREFILL_LAST, PREFILL)
        mode[:num_decodes] = np.where(self._caps > 0, VERIFY, DECODE)
        width = num_tokens + k_cap
        width[:num_decodes] += 1
        plan = Plan(
            epoch=state.epoch,
            step=state.planned_step + 1,
            freed=state.freed,
            admissions=self._admissions,
            extends=self._extends,
            rows=slots.tenancy[slot],
            slot=slot,
            slot_epoch=slots.slot_epoch[slot],
            mode=mode,
            num_tokens=num_tokens,
            len_lo=slots.committed[slot],
            len_hi=len_hi,
            k_cap=k_cap,
            accepted_step=slots.applied_step[slot],
            accepted=slots.accepted[slot],
            depends_on_step=slots.planned_step[slot],
            catch_up=catch_up,
            width=width,
            arms=state.snapshots.arm(slots, state.in_flight, slot, num_tokens),
            drafter_faults=state.drafter_faults,
        )
        state.freed = []
        _check(plan, state)
        slots.plan(plan.step, slot, width)
        state.planned_step = plan.step
        state.in_flight.append(plan)
        return plan


def _check(plan: Plan, state: SchedulerState) -> None:
    """The scheduler's side of the invariants, before the plan leaves."""
    slots, slot = state.slots, plan.slot
    check_plan_rows(
        slot=slot,
        mode=plan.mode,
        num_tokens=plan.num_tokens,
        len_lo=plan.len_lo,
        len_hi=plan.len_hi,
        k_cap=plan.k_cap,
        accepted=plan.accepted,
        depends_on_step=plan.depends_on_step,
        length=slots.committed[slot],
        capacity=slots.capacity[slot],
        prefill_len=slots.prefill_len[slot],
        max_len=slots.max_len[slot],
        logged_accepted=slots.accepted[slot],
        last_step=slots.planned_step[slot],
    )
