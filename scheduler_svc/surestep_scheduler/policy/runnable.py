"""Choose the requests of the next step: each has blocks for the fewest tokens of its row."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np
from surestep_common.invariants import IntArray

from surestep_scheduler.core.sequence import Sequence, Tenancy
from surestep_scheduler.core.state import SchedulerState

from .preemption import who_gives_way


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
        if state.quarantine or state.tables.will_give_back(slots_of(state.running)):
            # Blocks come back with the next result.
            covered = (needed.cumsum() <= state.pool.num_available) | (needed == 0)
            slot, missing = slot[covered], missing[:, covered]
            break
        state.preempt(who_gives_way(state))
    prefilling = slots.len_hi[slot] < slots.prefill_len[slot]
    state.tables.extend(slot[prefilling], missing[:, prefilling])
    return slot[~prefilling], [tenancy.seq for tenancy in slots.tenancy[slot[prefilling]]]


def _wanting(state: SchedulerState) -> tuple[IntArray, IntArray]:
    """Return slots that could go on if there are blocks, and the fewest tokens of their rows.

    A request that everything in flight may bring to its last token but one has to wait.
    """
    slots, slot = state.slots, slots_of(state.running)
    left = slots.prefill_len[slot] - slots.len_hi[slot]  # of its prompt
    wants = (left > 0) | (slots.len_hi[slot] + 2 <= slots.max_len[slot])
    return slot[wants], np.clip(left[wants], 1, state.limits.prompt_chunk)


def slots_of(tenancies: Seq[Tenancy]) -> IntArray:
    return np.array([tenancy.slot for tenancy in tenancies], dtype=np.int64)
