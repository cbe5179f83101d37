"""Share what is scarce between tenants: slots, blocks, and the tokens of a step for prompts.

Shares are max-min fair by weight. A tenant alone may use all there is; one that wants less than its
share leaves the rest to the others. When another tenant waits that has less than its fair share of
slots or blocks, the last request of the tenant that is most above its own makes room. It waits
again with all its tokens, and its blocks stay cached. What it then loses all the same, it makes up
for before it may be displaced again, so that no request is computed again and again for nothing.

Of a tenant's prompts the first request in the order has the first turn, so that it is never kept
waiting. Then come those that go on after a preemption or a fault, and then the prompts with least
left to compute, so that short ones are not kept waiting either. Each takes at most half of what is
left.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from itertools import accumulate, groupby
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from surestep_common.invariants import IntArray

from surestep_scheduler.core.queue import ActiveTenant
from surestep_scheduler.core.sequence import Sequence, Tenancy
from surestep_scheduler.core.state import SchedulerState

from .tiering import waits

MIN_CHUNK = 32  # tokens: below this a share of a step is not worth a row
_TURN = 64.0  # service by which tenants may differ that take turns in a slot

FloatArray = npt.NDArray[np.float64]
Amounts = Seq[float] | FloatArray  # [T] by tenant
Entitled = Mapping[ActiveTenant, int]


def fair_shares(capacity: float, demands: Amounts, weights: Amounts) -> FloatArray:
    """Max-min fair shares [T] of `capacity` by weight, none above its demand (water filling)."""
    wanted, weight = np.asarray(demands, np.float64), np.asarray(weights, np.float64)
    if wanted.sum() <= capacity:
        return wanted
    order = (wanted / weight).argsort(kind="stable")
    level, left, heavy = 0.0, capacity, weight.sum()
    for tenant in order.tolist():  # those that want least are satisfied first
        level = left / heavy
        if wanted[tenant] >= level * weight[tenant]:
            break
        left -= wanted[tenant]
        heavy -= weight[tenant]
    return np.minimum(wanted, level * weight)


def entitlements(capacity: int, demands: Amounts, weights: Amounts) -> list[int]:
    """Whole places [T] to which each is entitled: its fair share, and one in any case.

    A tenant with fewer may take one from a tenant with more. Both hold for as long as the demands
    stay what they are, so that nothing is taken back and forth.
    """
    return [max(1, int(share)) for share in fair_shares(capacity, demands, weights)]


def entitled_slots(state: SchedulerState) -> Entitled:
    """Return the slots that each tenant may insist on; empty where there is no need to share."""
    waiting = state.waiting.tenants
    if not waiting or len(state.tenants) == 1 or state.poison.candidates:
        return {}
    tenants = list(state.tenants)
    demands = [tenant.num_running + len(waiting.get(tenant, ())) for tenant in tenants]
    weights = [tenant.weight for tenant in tenants]
    return dict(zip(tenants, entitlements(state.limits.num_slots, demands, weights), strict=True))


def make_room(state: SchedulerState, entitled: Entitled) -> None:
    """Preempt requests of tenants above their share, for those that wait below theirs."""
    if not entitled:
        return
    if not any(tenant.num_running < entitled[tenant] for tenant in state.waiting.tenants):
        return
    blocks = _Blocks(state)
    coming = len(state.free_slots) + len(state.quarantine)
    served = [tenant.served for tenant in state.waiting.tenants if not tenant.num_running]
    least = min(served, default=math.inf)
    for _ in range(_slots_wanted(state, entitled, blocks) - coming):
        victim = _displaceable(state, lambda tenant: tenant.num_running / entitled[tenant])
        victim = victim or _after_its_turn(state, least)
        if victim is None:
            break
        state.preempt(victim, displaced=True)
    if state.free_slots and not state.quarantine:  # else blocks come back with the next results
        _make_room_in_blocks(state, entitled, blocks)


def _after_its_turn(state: SchedulerState, least: float) -> Tenancy | None:
    """Return who gives way where there are more tenants than slots and they take turns.

    The tenant that has been served most gives way to those that run nothing, of which one has
    been served `least`.
    """
    return _displaceable(state, lambda tenant: (tenant.served - least) / _TURN)


class _Blocks:
    """Blocks that each tenant holds, and those that it may insist on."""

    def __init__(self, state: SchedulerState) -> None:
        self.held: Counter[ActiveTenant] = Counter()
        for tenancy in state.running:
            self.held[tenancy.seq.tenant] += len(tenancy.blocks)
        tenants, waiting = list(state.tenants), state.waiting.tokens_of
        demands = [float(self.held[t] + state.limits.blocks_of(waiting(t) + 1)) for t in tenants]
        capacity = max(state.pool.num_blocks - 1 - state.headroom, 1)
        shares = fair_shares(capacity, demands, [t.weight for t in tenants])
        self.shares: dict[ActiveTenant, float] = dict(zip(tenants, shares.tolist(), strict=True))

    def entitles(self, seq: Sequence, num_blocks: int) -> bool:
        """Return whether the tenant has no more than its share with so many more."""
        return self.held[seq.tenant] + num_blocks <= self.shares[seq.tenant]

    def use(self, tenant: ActiveTenant) -> float:
        """Return how much of its share a tenant holds."""
        return self.held[tenant] / self.shares[tenant]


def _slots_wanted(state: SchedulerState, entitled: Entitled, blocks: _Blocks) -> int:
    """Count the slots that tenants below their share want for requests of the next step."""
    wanted, budget = 0, state.limits.max_num_batched_tokens
    for tenant, seqs in state.waiting.tenants.items():
        if budget <= 0:
            break
        for seq in seqs[: max(entitled[tenant] - tenant.num_running, 0)]:
            most = state.limits.blocks_of(len(seq.tokens) + 1)
            has_blocks = most + state.headroom <= state.pool.num_available
            if budget <= 0 or not (has_blocks or blocks.entitles(seq, most)):
                break
            wanted += 1
            budget -= len(seq.tokens)
    return wanted


def _make_room_in_blocks(state: SchedulerState, entitled: Entitled, blocks: _Blocks) -> None:
    """Make room for the next request if its tenant stays within its share with all it needs."""
    for seq in state.waiting.first(1, state.poison.allows, entitled):
        found = state.lookup(seq)
        missing = found.missing if blocks.entitles(seq, found.num_fresh) else 0
        while missing > 0:
            victim = _displaceable(state, blocks.use)
            if victim is None:
                return
            missing -= len(victim.blocks)
            blocks.held[victim.seq.tenant] -= len(victim.blocks)
            state.preempt(victim, displaced=True)


def _displaceable(state: SchedulerState, use: Callable[[ActiveTenant], float]) -> Tenancy | None:
    """Return the last settled request of the tenant that uses most of its share, `use` > 1."""
    slots = state.slots
    above = [tenant for tenant in state.tenants if tenant.num_running and use(tenant) > 1]
    for tenant in sorted(above, key=use, reverse=True):
        for tenancy in reversed(state.running):
            settled = slots.committed[tenancy.slot] >= slots.settled_at[tenancy.slot]
            if tenancy.seq.tenant is tenant and settled:
                return tenancy
    return None


def runnable(state: SchedulerState) -> tuple[IntArray, list[Sequence]]:
    """Return slots that can decode now, and requests whose prompt is not planned to its end.

    Each of these slots needs a block at most in each KV group for its next token. Where there are
    too few, a request makes room; those that have to wait for that are left out.
    """
    slots = state.slots
    while True:
        slot, least = _wanting(state)
        missing = state.tables.missing(slot, slots.len_hi[slot] + least)
        needed = missing.sum(axis=0)
        if needed.sum() <= state.pool.num_available:
            break
        if _blocks_come_back(state):
            covered = (needed.cumsum() <= state.pool.num_available) | (needed == 0)
            slot, missing = slot[covered], missing[:, covered]
            break
        state.preempt(who_gives_way(state))
    prefilling = slots.len_hi[slot] < slots.prefill_len[slot]
    state.tables.extend(slot[prefilling], missing[:, prefilling])
    return slot[~prefilling], [tenancy.seq for tenancy in slots.tenancy[slot[prefilling]]]


def admissible(state: SchedulerState, entitled: Entitled) -> list[Sequence]:
    """Return the requests that are next and do not wait for the tiers."""
    tiers, allows = state.limits.has_tiers, state.poison.allows

    def allows_now(request_id: str) -> bool:
        return allows(request_id) and not state.tiers.waits(request_id)

    allowed = allows_now if tiers else allows
    candidates = state.waiting.first(len(state.free_slots), allowed, entitled)
    return [seq for seq in candidates if not waits(state, seq)] if tiers else candidates


def _blocks_come_back(state: SchedulerState) -> bool:
    """Return whether the next results, or answers of the tiers, bring blocks."""
    if state.quarantine or state.tiers.num_held:
        return True
    return state.tables.will_give_back(slots_of(state.running))


def _wanting(state: SchedulerState) -> tuple[IntArray, IntArray]:
    """Return slots that could go on if there are blocks, and the fewest tokens of their rows.

    A request that everything in flight may bring to its last token but one has to wait.
    """
    slots, slot = state.slots, slots_of(state.running)
    left = slots.prefill_len[slot] - slots.len_hi[slot]  # of its prompt
    wants = (left > 0) | (slots.len_hi[slot] + 2 <= slots.max_len[slot])
    return slot[wants], np.clip(left[wants], 1, state.limits.prompt_chunk)


def who_gives_way(state: SchedulerState) -> Tenancy:
    """Choose what to preempt when those that run need more blocks than there are.

    The last request in the order, of the tenant that holds most of its share.
    """
    if len(state.tenants) == 1:
        return state.running[-1]
    blocks = _Blocks(state)
    greatest = max((t.seq.tenant for t in state.running), key=blocks.use)
    return next(t for t in reversed(state.running) if t.seq.tenant is greatest)


def slots_of(tenancies: Seq[Tenancy]) -> IntArray:
    return np.array([tenancy.slot for tenancy in tenancies], dtype=np.int64)


class Turn(NamedTuple):
    """Prompts of a tenant in the order of their turns."""

    tenant: ActiveTenant
    prompts: list[Sequence]
    num_tokens: int  # that are not planned yet, at most

    @classmethod
    def of(cls, state: SchedulerState, tenant: ActiveTenant, prompts: Seq[Sequence]) -> Turn:
        """Make the turn of a tenant; `prompts` come in any order."""
        first = min(prompts, key=lambda seq: seq.order)
        left = {seq: uncomputed(state, seq) for seq in prompts}

        def place(seq: Sequence) -> tuple[bool, bool, int, tuple[float, int]]:
            return seq is not first, not seq.goes_on, 0 if seq.goes_on else left[seq], seq.order

        return cls(tenant, _new_ones_too(sorted(prompts, key=place)), sum(left.values()))


def turns(state: SchedulerState, prompts: Seq[Sequence]) -> list[Turn]:
    """Return the turns of these prompts' tenants, those first that have been served least."""
    by_tenant = sorted(prompts, key=lambda seq: seq.tenant.index)
    made = [
        Turn.of(state, tenant, list(seqs))
        for tenant, seqs in groupby(by_tenant, key=lambda seq: seq.tenant)
    ]
    return sorted(made, key=lambda turn: (turn.tenant.served, turn.prompts[0].order))


def shares(turns: Seq[Turn], budget: int, chunk: int) -> list[int]:
    """Return the tokens of a step for each of the turns; at most `budget` together.

    Where there are so many tenants that each would have next to nothing, those that were served
    least share the step, and the others the next. The first has `chunk` tokens in any case: with
    fewer a prompt may not go on at all.
    """
    if len(turns) <= 1:
        return [budget] * len(turns)
    demands = [turn.num_tokens for turn in turns]
    least = accumulate(min(demand, max(MIN_CHUNK, chunk)) for demand in demands)
    reach = max(1, sum(total <= budget for total in least))
    weights = [turn.tenant.weight for turn in turns[:reach]]
    exact = fair_shares(budget, demands[:reach], weights).astype(int).tolist()
    first = min(demands[0], chunk, budget)
    if exact[0] < first:
        others = fair_shares(budget - first, demands[1:reach], weights[1:])
        exact = [first, *others.astype(int).tolist()]
    return [*exact, *[0] * (len(turns) - reach)]


def cut(start: int, num_tokens: int, shared_len: int, chunk: int) -> int:
    """Return how many of these tokens of a prompt a step may take: its chunks stay whole."""
    end = start + num_tokens
    return num_tokens if end >= shared_len else end // chunk * chunk - start


def fewest(state: SchedulerState, seq: Sequence) -> int:
    """Return the fewest tokens with which its prompt goes on, wherever it may stand."""
    at = 0 if seq.tenancy is None else int(state.slots.len_hi[seq.tenancy.slot])
    return state.limits.prompt_chunk if at < seq.shared_len else 1


def uncomputed(state: SchedulerState, seq: Sequence) -> int:
    """Count prompt tokens that are not planned yet; while it waits all of them, cached or not."""
    if seq.tenancy is None:
        return len(seq.tokens)
    slots, slot = state.slots, seq.tenancy.slot
    return int(slots.prefill_len[slot] - slots.len_hi[slot])


def _new_ones_too(prompts: list[Sequence]) -> list[Sequence]:
    """Give the first new request the second turn while others are computed again after a fault."""
    if prompts and prompts[0].num_replays:
        new = next((i for i, seq in enumerate(prompts) if not seq.num_replays), 0)
        prompts[1:1] = [prompts.pop(new)] if new else []
    return prompts
