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
    prompts = list(heapq.merge(prefilling, state.waiting[: len(state.free_slots)], key=_order))
    budget = state.limits.max_num_batched_tokens
    budget -= step.add_decodes(ready, budget, crowded=bool(prompts))
    step.add_prefills(prompts, budget, now)
    return step.finish()


def _order(seq: Sequence) -> tuple[float, int]:
    return seq.order


def _split(state: SchedulerState) -> tuple[list[Tenancy], list[Sequence]]:
    """Requests that can decode now, and those whose prompt is not planned to its end.

    A request that everything in flight may bring to its last token but one has to wait.
    """
    slots, running = state.slots, state.running
    slot = _slots_of(running)
    len_hi = slots.len_hi[slot]
    prefilling = len_hi < slots.prefill_len[slot]
    ready = ~prefilling & (len_hi + 2 <= slots.max_len[slot])
    return (
        [running[row] for row in np.flatnonzero(ready).tolist()],
        [running[row].seq for row in np.flatnonzero(prefilling).tolist()],
    )


def _slots_of(tenancies: Seq[Tenancy]) -> IntArray:
    return np.array([tenancy.slot for tenancy in tenancies], dtype=np.int64)


class _Step:
    """A plan under construction."""

    def __init__(self, state: SchedulerState) -> None:
        self._state = state
        self._admissions: list[Tenancy] = []
        self._extends: list[Extend] = []
        self._decodes: list[Tenancy] = []
        self._caps: IntArray = np.zeros(0, dtype=np.int64)  # k_cap, parallel to _decodes
        self._prefills: list[Tenancy] = []
        self._chunks: list[int] = []  # tokens, parallel to _prefills

    def add_decodes(self, ready: list[Tenancy], budget: int, *, crowded: bool) -> int:
        """One row for each request that decodes; returns the tokens they take.

        `crowded`: prompts wait, so that drafts may only have half of what is left.
        """
        if not ready:
            return 0
        slots, slot = self._state.slots, _slots_of(ready)
        spare = budget - len(ready)
        share = (spare // 2 if crowded else spare) // len(ready)
        room = slots.max_len[slot] - slots.len_hi[slot] - 2
        caps = np.minimum(np.minimum(slots.draft_cap[slot], share), room)
        covered = slots.capacity[slot] - slots.len_hi[slot] - 1  # drafts that need no new block
        for row in np.flatnonzero(caps > covered).tolist():
            if slots.open[slot[row]]:  # did not give up its blocks to an earlier one
                caps[row] = self._grow(ready[row], int(caps[row]), int(covered[row]))
        kept = slots.open[slot] & (caps >= 0)
        self._decodes = [ready[row] for row in np.flatnonzero(kept).tolist()]
        self._caps = caps[kept]
        return len(self._decodes) + int(self._caps.sum())

    def _grow(self, tenancy: Tenancy, k: int, covered: int) -> int:
        """Get blocks for a row of up to `k` drafts; returns how many it may have, -1 for no row."""
        state, size = self._state, self._state.limits.block_size
        while k > covered:
            missing = -(-(k - covered) // size)
            if missing <= state.pool.num_available:
                self._extends.append(Extend(tenancy.slot, state.extend(tenancy, missing)))
                break
            if k > 0:
                k -= 1
            elif state.quarantine:  # blocks come back with the next result
                return -1
            else:
                # The last in the order. Rows are added in order, so it has none in this plan.
                victim = state.running[-1]
                state.preempt(victim)
                if victim is tenancy:
                    return -1
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
            chunk = min(self._uncomputed(tenancy), max(left // 2, _MIN_CHUNK), left)
            self._prefills.append(tenancy)
            self._chunks.append(chunk)
            left -= chunk
        self._top_up(left)

    def _uncomputed(self, tenancy: Tenancy) -> int:
        slots, slot = self._state.slots, tenancy.slot
        return int(slots.prefill_len[slot] - slots.len_hi[slot])

    def _admit(self, seq: Sequence, now: float) -> Tenancy | None:
        tenancy = self._state.admit(seq, now)
        if tenancy is not None:
            self._admissions.append(tenancy)
            self._extends.append(Extend(tenancy.slot, list(tenancy.blocks)))
        return tenancy

    def _top_up(self, left: int) -> None:
        """Hand out what the shares left over, first come first served."""
        for index, tenancy in enumerate(self._prefills):
            more = min(left, self._uncomputed(tenancy) - self._chunks[index])
            self._chunks[index] += more
            left -= more

    def finish(self) -> Plan | None:
        """Fill the columns, check them, and count the rows as scheduled."""
        state, slots, rows = self._state, self._state.slots, self._decodes + self._prefills
        if not rows:
            return None
        slot, num_decodes = _slots_of(rows), len(self._decodes)
        k_cap, num_tokens = np.zeros((2, len(rows)), dtype=np.int64)
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
            rows=rows,
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
            width=width,
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
