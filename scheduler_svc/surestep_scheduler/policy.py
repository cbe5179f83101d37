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

from surestep_common.invariants import (
    DECODE,
    PREFILL,
    PREFILL_LAST,
    VERIFY,
    check_plan_row,
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
    ready, prefilling = _split(state.running)
    prompts = list(heapq.merge(prefilling, state.waiting[: len(state.free_slots)], key=_order))
    budget = state.limits.max_num_batched_tokens
    budget -= step.add_decodes(ready, budget, crowded=bool(prompts))
    step.add_prefills(prompts, budget, now)
    return step.finish()


def _order(seq: Sequence) -> tuple[float, int]:
    return seq.order


def _split(running: list[Tenancy]) -> tuple[list[Tenancy], list[Sequence]]:
    """Requests that can decode now, and those whose prompt is not planned to its end.

    A request that everything in flight may bring to its last token but one has to wait.
    """
    ready, prefilling = [], []
    for tenancy in running:
        if tenancy.len_hi < tenancy.prefill_len:
            prefilling.append(tenancy.seq)
        elif tenancy.len_hi + 2 <= tenancy.max_len:
            ready.append(tenancy)
    return ready, prefilling


class _Step:
    """A plan under construction."""

    def __init__(self, state: SchedulerState) -> None:
        self._state = state
        self._admissions: list[Tenancy] = []
        self._extends: list[Extend] = []
        self._decodes: list[Tenancy] = []
        self._caps: list[int] = []  # k_cap, parallel to _decodes
        self._prefills: list[Tenancy] = []
        self._chunks: list[int] = []  # tokens, parallel to _prefills

    def add_decodes(self, ready: list[Tenancy], budget: int, *, crowded: bool) -> int:
        """One row for each request that decodes; returns the tokens they take.

        `crowded`: prompts wait, so that drafts may only have half of what is left.
        """
        if not ready:
            return 0
        spare = budget - len(ready)
        share = (spare // 2 if crowded else spare) // len(ready)
        for tenancy in ready:
            if not tenancy.open:  # gave up its blocks to an earlier one
                continue
            len_hi = tenancy.len_hi
            k = min(share, tenancy.draft_cap, tenancy.max_len - len_hi - 2)
            if len_hi + k + 1 > tenancy.capacity:
                grown = self._grow(tenancy, k)
                if grown is None:
                    continue
                k = grown
            self._decodes.append(tenancy)
            self._caps.append(k)
        return len(self._decodes) + sum(self._caps)

    def _grow(self, tenancy: Tenancy, k: int) -> int | None:
        """Get blocks for a row of up to `k` drafts; returns how many they cover, if any row."""
        state, size = self._state, self._state.limits.block_size
        while True:
            missing = -(-(tenancy.len_hi + k + 1 - tenancy.capacity) // size)
            if missing <= state.pool.num_available:
                if missing > 0:
                    blocks = state.extend(tenancy, missing)
                    self._extends.append(Extend(tenancy.slot, blocks))
                return k
            if k > 0:
                k -= 1
            elif state.quarantine:  # blocks come back with the next result
                return None
            else:
                # The last in the order. Rows are added in order, so it has none in this plan.
                victim = state.running[-1]
                state.preempt(victim)
                if victim is tenancy:
                    return None

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
            wanted = tenancy.prefill_len - tenancy.len_hi
            chunk = min(wanted, max(left // 2, _MIN_CHUNK), left)
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
            more = min(left, tenancy.prefill_len - tenancy.len_hi - self._chunks[index])
            self._chunks[index] += more
            left -= more

    def finish(self) -> Plan | None:
        """Fill the columns, check them, and count the rows as scheduled."""
        state, rows = self._state, self._decodes + self._prefills
        if not rows:
            return None
        no_drafts = [0] * len(self._prefills)
        plan = Plan(
            epoch=state.epoch,
            step=state.planned_step + 1,
            freed=state.freed,
            admissions=self._admissions,
            extends=self._extends,
            rows=rows,
            slot=[t.slot for t in rows],
            slot_epoch=[t.slot_epoch for t in rows],
            mode=[VERIFY if k else DECODE for k in self._caps]
            + [
                PREFILL_LAST if t.len_hi + chunk == t.prefill_len else PREFILL
                for t, chunk in zip(self._prefills, self._chunks, strict=True)
            ],
            num_tokens=[0] * len(self._decodes) + self._chunks,
            len_lo=[t.committed for t in rows],
            len_hi=[t.len_hi for t in rows],
            k_cap=self._caps + no_drafts,
            accepted_step=[t.applied_step for t in rows],
            accepted=[t.accepted for t in rows],
            depends_on_step=[t.planned_step for t in rows],
            width=[k + 1 for k in self._caps] + self._chunks,
        )
        state.freed = []
        _check(plan)
        _commit(state, plan)
        return plan


def _check(plan: Plan) -> None:
    """The scheduler's side of the invariants, before the plan leaves."""
    columns = zip(
        plan.rows, plan.mode, plan.num_tokens, plan.len_lo, plan.len_hi, plan.k_cap, plan.accepted,
        plan.depends_on_step, strict=True,
    )  # fmt: skip
    for tenancy, mode, num_tokens, len_lo, len_hi, k_cap, accepted, depends_on_step in columns:
        check_plan_row(
            mode=mode,
            num_tokens=num_tokens,
            len_lo=len_lo,
            len_hi=len_hi,
            k_cap=k_cap,
            accepted=accepted,
            depends_on_step=depends_on_step,
            length=tenancy.committed,
            capacity=tenancy.capacity,
            prefill_len=tenancy.prefill_len,
            max_len=tenancy.max_len,
            logged_accepted=tenancy.accepted,
            last_step=tenancy.planned_step,
        )


def _commit(state: SchedulerState, plan: Plan) -> None:
    for tenancy, width in zip(plan.rows, plan.width, strict=True):
        tenancy.len_hi += width
        tenancy.planned_step = plan.step
        tenancy.ledger.scheduled += width
    state.planned_step = plan.step
    state.in_flight.append(plan)
