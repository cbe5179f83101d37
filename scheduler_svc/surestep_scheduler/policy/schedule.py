"""Plan the next step: continuous batching with chunked prefill.

Tenants share slots, blocks and tokens fairly. Within a tenant requests are served in one order,
`arrival + priority * priority_aging_s`: a level of priority is worth that many seconds of waiting,
so no request waits for ever. Requests that decode come first, one token each; prompts share what is
left. Drafts fill up the budget. When blocks run out, drafts are given up first, and then requests.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from typing import NamedTuple

import numpy as np
from surestep_common.invariants import (
    DECODE,
    POOL,
    PREFILL,
    PREFILL_LAST,
    VERIFY,
    BoolArray,
    IntArray,
    KnownSlots,
    PlanRows,
    check_plan_rows,
)

from surestep_scheduler.core.messages import NO_SNAPSHOTS, Plan, PlannedSnapshots
from surestep_scheduler.core.queue import OUTPUT_TOKEN
from surestep_scheduler.core.sequence import Sequence, Tenancy
from surestep_scheduler.core.state import SchedulerState

from .sharing import (
    MIN_CHUNK,
    Turn,
    admissible,
    cut,
    entitled_slots,
    fewest,
    make_room,
    runnable,
    shares,
    slots_of,
    turns,
    uncomputed,
)
from .snapshot_requests import snapshot_requests, up_to_branch
from .tiering import store_idle


def schedule(state: SchedulerState, now: float) -> Plan | None:
    """Plan the next step and account for it in `state`; None when nothing can run before a result.

    `now` is in seconds on the clock of `SchedulerState.add`.
    """
    entitled = entitled_slots(state)
    make_room(state, entitled)
    ready, prefilling = runnable(state)
    candidates = admissible(state, entitled)
    prompts = turns(state, [*prefilling, *candidates])
    step, budget = _StepBuilder(state), state.limits.max_num_batched_tokens
    prompt_tokens = sum(turn.num_tokens for turn in prompts)
    budget -= step.add_decodes(ready, budget, min(prompt_tokens, budget - len(ready)))
    step.add_prefills(prompts, budget, now)
    plan = step.finish()
    if state.limits.has_tiers:
        store_idle(state)
    return plan


class _StepBuilder:
    """A plan under construction."""

    def __init__(self, state: SchedulerState) -> None:
        self._state = state
        self._admissions: list[Tenancy] = []
        self._decodes = np.zeros(0, dtype=np.int64)  # slots
        self._max_drafts = np.zeros(0, dtype=np.int64)  # parallel to _decodes
        self._proposed = np.zeros(0, dtype=np.int64)  # max_proposed, parallel to _decodes
        self._looked_up = np.zeros(0, dtype=np.int64)  # max_looked_up, parallel to _decodes
        self._caught_up = np.zeros(0, dtype=np.int64)  # catch_up, parallel to _decodes
        self._catch_up = CatchUpBudget(state)
        self._prefills: list[Tenancy] = []
        self._chunks: list[int] = []  # tokens, parallel to _prefills
        self._bytes_left = state.limits.admissions_bytes

    def add_decodes(self, slot: IntArray, budget: int, prompt_tokens: int) -> int:
        """Add a row for each request that decodes; return the tokens they take.

        While `prompt_tokens` wait, drafts may only have half of what is left, and no chunk of it
        that a prompt needs to go on.
        """
        if not len(slot):
            return 0
        state, slots = self._state, self._state.slots
        spare = budget - len(slot)
        for_prompts = min(prompt_tokens, max(-(-spare // 2), state.limits.prompt_chunk))
        share = max(spare - for_prompts, 0) // len(slot)
        room = slots.max_len[slot] - slots.len_hi[slot] - 2
        caps = np.minimum(np.minimum(slots.draft_cap[slot], room), share)
        context = slots.len_hi[slot]
        proposed, looked_up = state.speculation.lengths(
            slot,
            caps,
            context,
            context - slots.drafter_len[slot],
            num_tokens=len(slot) + prompt_tokens,
        )
        catch_up = self._catch_up.grant(slot, proposed > 0)
        proposed[~catch_up.whole] = 0
        # What grammars force is seldom much, and costs nothing then: it gets what prompts leave.
        drafts = np.maximum(proposed, looked_up)
        left = max(spare - prompt_tokens - int(drafts.sum()), 0) // len(slot)
        forced = np.minimum(np.minimum(slots.forced_cap[slot], room), left)
        max_drafts = np.maximum(drafts, forced)
        missing = self._cover(slot, max_drafts)
        state.tables.extend(slot, missing)
        self._decodes, self._max_drafts = slot, max_drafts
        self._proposed = np.minimum(proposed, max_drafts)
        self._looked_up = np.minimum(looked_up, max_drafts)
        self._caught_up = catch_up.num_tokens
        return len(slot) + int(max_drafts.sum())

    def _cover(self, slot: IntArray, max_drafts: IntArray) -> IntArray:
        """Return the blocks [G, R] that rows with so many drafts need.

        Where blocks are scarce, `max_drafts` is lowered in place, the last rows' first. There is a
        block for every row that needs one without drafts.
        """
        state, without = self._state, self._state.slots.len_hi[slot] + 1
        missing = state.tables.missing(slot, without + max_drafts)
        spare = state.pool.num_available - int(missing.sum())
        for row in missing.sum(axis=0).nonzero()[0].tolist()[::-1] if spare < 0 else ():
            while spare < 0 and max_drafts[row] > 0:
                max_drafts[row] -= 1
                fewer = state.tables.missing(slot[[row]], without[[row]] + max_drafts[[row]])
                spare += int(missing[:, row].sum() - fewer.sum())
                missing[:, row] = fewer[:, 0]
        return missing

    def add_prefills(self, turns: Seq[Turn], budget: int, now: float) -> None:
        """Add chunks for prompts in their turns, admitting those that wait while there is room.

        A request for which there is no room may be overtaken by other tenants, but not for longer
        than until they have been served as much as it would have been. What one tenant leaves of
        its share is for the next.
        """
        each = shares(turns, budget, self._state.limits.prompt_chunk)
        left, overtaken = budget - sum(each), math.inf
        for turn, share in zip(turns, each, strict=True):
            first, admitting = len(self._prefills), turn.tenant.served < overtaken
            left += share
            for seq in turn.prompts:
                if left <= 0:
                    break
                if left < fewest(self._state, seq):
                    continue
                tenancy = seq.tenancy
                if tenancy is None and admitting:
                    tenancy = self._admit(seq, now)
                    if tenancy is None:  # those behind must not overtake it
                        admitting = False
                        overtaken = min(overtaken, turn.tenant.after(len(seq.tokens)))
                if tenancy is not None:
                    wanted = max(left // 2, MIN_CHUNK, self._state.limits.prompt_chunk)
                    self._prefills.append(tenancy)
                    self._chunks.append(self._take(tenancy, 0, min(wanted, left)))
                    left -= self._chunks[-1]
            left = self._top_up(first, left)
        self._top_up(0, left)

    def _admit(self, seq: Sequence, now: float) -> Tenancy | None:
        num_bytes = self._state.limits.admission_bytes(len(seq.tokens), seq.request.passed_bytes)
        if num_bytes > self._bytes_left:  # the next plan has room for it
            return None
        tenancy = self._state.admit(seq, now)
        if tenancy is not None:
            self._bytes_left -= num_bytes
            self._admissions.append(tenancy)
        return tenancy

    def _top_up(self, first: int, left: int) -> int:
        """Hand out what shares left over, first come first served; return what is left still."""
        for index, tenancy in enumerate(self._prefills[first:], first):
            if not left:
                break
            more = self._take(tenancy, self._chunks[index], left)
            self._chunks[index] += more
            left -= more
        return left

    def _take(self, tenancy: Tenancy, taken: int, more: int) -> int:
        """Return how many `more` tokens its prompt takes behind those `taken`, and cover them.

        What was cached is known by now.
        """
        state, seq = self._state, tenancy.seq
        slot, start = tenancy.slot, int(state.slots.len_hi[tenancy.slot])
        most = min(
            taken + more, uncomputed(state, seq), tenancy.max_chunk, self._reach(slot) - start
        )
        if state.snapshots.num_ids:
            most = up_to_branch(state, slot, most)
        chunk = cut(start, most, seq.shared_len, state.limits.prompt_chunk)
        slots = np.array([slot])
        state.tables.extend(slots, state.tables.missing(slots, np.array([start + chunk])))
        return chunk - taken

    def _reach(self, slot: int) -> int:
        """Return up to which token a prompt can be covered, leaving blocks for others to go on."""
        state = self._state
        covered, num_sliding = int(state.slots.covered(slot)), len(state.tables.groups.sliding)
        if not num_sliding:
            return covered
        spare = max(state.pool.num_available - state.headroom, 0)
        return covered + spare // num_sliding * state.limits.block_size

    def _prepare_to_draft(self, slot: IntArray) -> IntArray:
        """Return what the drafter makes up for while prompts [R] are computed."""
        if not len(slot):
            return slot
        drafts = self._state.slots.draft_cap[slot] > 0
        return self._catch_up.grant(slot, drafts & self._state.speculation.drafts_soon).num_tokens

    def finish(self) -> Plan | None:
        """Fill the columns, check them, and count the rows as scheduled."""
        state, slots, num_decodes = self._state, self._state.slots, len(self._decodes)
        slot = np.concatenate((self._decodes, slots_of(self._prefills)))
        if not len(slot):
            return None
        tenancies, num_tokens = slots.tenancy[slot], np.zeros(len(slot), dtype=np.int64)
        num_tokens[num_decodes:] = self._chunks
        rows = self._rows(slot, num_tokens, num_decodes)
        give_backs, extends = state.tables.changes()
        width = num_tokens + rows.max_drafts
        width[:num_decodes] += 1
        plan = Plan(
            epoch=state.epoch,
            step=state.planned_step + 1,
            freed=state.freed,
            admissions=self._admissions,
            give_backs=give_backs,
            extends=extends,
            tenancies=tenancies,
            rows=rows,
            width=width,
            snapshot_requests=self._snapshot_requests(slot, num_tokens),
            drafter_faults=state.drafter_faults,
            capture=state.missed_kind,
            planner=state.planner if state.limits.enable_prefix_caching else 0,
            kept=state.kept if not state.planned_step else None,
        )
        _check(rows, state)
        self._charge(rows)
        state.launch(plan)
        return plan

    def _rows(self, slot: IntArray, num_tokens: IntArray, num_decodes: int) -> PlanRows:
        """Return the columns of rows [R], of which the first `num_decodes` decode."""
        slots, len_hi = self._state.slots, self._state.slots.len_hi[slot]
        max_drafts, proposed, looked_up, catch_up = np.zeros((4, len(slot)), dtype=np.int64)
        max_drafts[:num_decodes], proposed[:num_decodes] = self._max_drafts, self._proposed
        looked_up[:num_decodes] = self._looked_up
        catch_up[:num_decodes] = self._caught_up
        catch_up[num_decodes:] = self._prepare_to_draft(slot[num_decodes:])
        last = np.where(slots.pools[slot], POOL, PREFILL_LAST)
        mode = np.where(len_hi + num_tokens == slots.prefill_len[slot], last, PREFILL)
        mode[:num_decodes] = np.where(self._max_drafts > 0, VERIFY, DECODE)
        return PlanRows(
            slot=slot,
            slot_epoch=slots.slot_epoch[slot],
            mode=mode,
            num_tokens=num_tokens,
            len_lo=slots.committed[slot],
            len_hi=len_hi,
            max_drafts=max_drafts,
            max_proposed=proposed,
            max_looked_up=looked_up,
            accepted_step=slots.applied_step[slot],
            accepted=slots.accepted[slot],
            depends_on_step=slots.planned_step[slot],
            catch_up=catch_up,
            adapter=slots.adapter[slot],
        )

    def _snapshot_requests(self, slot: IntArray, num_tokens: IntArray) -> PlannedSnapshots:
        """Return the snapshots that are taken of rows [R] with so many prompt tokens."""
        if not self._state.snapshots.num_ids:
            return NO_SNAPSHOTS
        return snapshot_requests(self._state, slot, num_tokens)

    def _charge(self, rows: PlanRows) -> None:
        """Charge tenants for what is computed for the first time; drafts are free."""
        slots, slot = self._state.slots, rows.slot
        fresh = rows.len_hi + rows.num_tokens - np.maximum(rows.len_hi, slots.paid_len[slot])
        cost = np.where(rows.num_tokens > 0, np.maximum(fresh, 0.0), OUTPUT_TOKEN)
        self._state.tenants.charge(slots.tenant[slot], cost)


def _check(rows: PlanRows, state: SchedulerState) -> None:
    """Check the scheduler's side of the invariants before the plan leaves. Raises LedgerError."""
    slots, slot = state.slots, rows.slot
    known = KnownSlots(
        length=slots.committed[slot],
        capacity=slots.covered(slot),
        prefill_len=slots.prefill_len[slot],
        max_len=slots.max_len[slot],
        prompt_len=slots.prompt_len[slot],
        pools=slots.pools[slot],
        logged_accepted=slots.accepted[slot],
        last_step=slots.planned_step[slot],
        prompt_chunk=state.limits.prompt_chunk,
        own_adapter=slots.adapter[slot],
    )
    check_plan_rows(rows, known)


class CatchUp(NamedTuple):
    """Positions of the drafter that rows [R] make up for."""

    num_tokens: IntArray
    whole: BoolArray  # nothing is left to make up for: the row may draft


class CatchUpBudget:
    """Positions that a drafter's state lags behind and that one step may make up for.

    See "Drafters with state" in docs/change/protocol.md. Applied results say where the drafter has
    come to. Rows in flight have a bound, found by playing them through with the least that they may
    commit.

    What rows that draft all the time lag behind was committed by the steps in flight, and is within
    the budget together. So small lags go first. What they leave is for those that have far to go:
    prompts found in the prefix cache without the drafter's part, and requests that draft again.
    """

    def __init__(self, state: SchedulerState) -> None:
        limits = state.limits
        self._state = state
        self._left = limits.max_num_batched_tokens * max(1, limits.pipeline_depth)

    def grant(self, slot: IntArray, wanted: BoolArray) -> CatchUp:
        """Return positions for the rows [R] that want to draft, now or later; 0 for the others."""
        if not self._state.limits.drafter_has_state:
            nothing = np.zeros(len(slot), dtype=np.int64)
            return CatchUp(nothing, whole=nothing == 0)
        lag = self._state.slots.len_hi[slot] - _floor(self._state)[slot]
        asked = np.where(wanted, lag, 0)
        order = asked.argsort(kind="stable")
        granted = np.zeros_like(asked)
        granted[order] = np.diff(np.minimum(asked[order].cumsum(), self._left), prepend=0)
        self._left -= int(granted.sum())
        return CatchUp(granted, whole=granted == lag)


def _floor(state: SchedulerState) -> IntArray:
    """Return the fewest positions [num_slots] that the drafter covers after all in flight."""
    slots = state.slots
    upto, length = slots.drafter_len.copy(), slots.committed.copy()
    for plan in state.in_flight:
        rows, slot = plan.rows, plan.rows.slot
        if plan.drafter_faults == state.drafter_faults:  # else the drafter is left alone
            upto[slot] = np.minimum(length[slot], upto[slot] + rows.catch_up)
        length[slot] += plan.width - rows.max_drafts
    return upto
