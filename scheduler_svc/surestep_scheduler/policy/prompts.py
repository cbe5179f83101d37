"""Share a step's tokens among prompts, and order them.

Tenants share the tokens max-min fairly by weight. Within a tenant the first request in the order
has the first turn, so that it is never kept waiting. Then come those that go on after a preemption
or a fault, and then the prompts with least left to compute, so that short ones are not kept waiting
either. Each takes at most half of what is left.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from itertools import accumulate, groupby
from typing import NamedTuple

from surestep_scheduler.core.queue import ActiveTenant
from surestep_scheduler.core.sequence import Sequence
from surestep_scheduler.core.state import SchedulerState

from .fairness import fair_shares

MIN_CHUNK = 32  # tokens: below this a share of a step is not worth a row


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
