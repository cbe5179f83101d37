"""The watermark of a drafter with state: how far it lags, and how much of that a step makes up for.

See "Drafters with state" in docs/change/protocol.md. Applied results say where the drafter has come
to. Rows in flight have a bound, found by playing them through with the least that they may commit.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from surestep_common.invariants import BoolArray, IntArray

from surestep_scheduler.core.state import SchedulerState


class CatchUp(NamedTuple):
    """Positions of the drafter that rows [R] make up for."""

    num_tokens: IntArray
    whole: BoolArray  # nothing is left to make up for: the row may draft


class CatchUpBudget:
    """Positions of the drafter that one step may make up for.

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
