"""The rows of a result that still count: those whose tenancies are open."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from surestep_common.invariants import POOL, BoolArray, IntArray, LedgerError, PlanRows, ResultRows

from .messages import Outcome, Plan
from .sequence import Tenancy
from .state import SchedulerState

_LOGIT_BYTES = 4


def check_columns(plan: Plan, outcome: Outcome, vocab_size: int) -> None:
    """Raise LedgerError unless the result answers the plan, in columns of one length."""
    same = np.array_equal(outcome.slot, plan.rows.slot)
    if not same or not np.array_equal(outcome.slot_epoch, plan.rows.slot_epoch):
        raise LedgerError(f"step {plan.step}: the result's rows are not the plan's")
    if {len(column) for _, column in outcome.rows.columns()} != {len(plan.rows)}:
        raise LedgerError(f"step {plan.step}: columns of unequal length")
    if len(outcome.token_ids) != outcome.rows.n_emitted.sum():
        raise LedgerError(f"step {plan.step}: token ids and counts differ")
    if outcome.token_ids.max(initial=0) >= vocab_size:
        raise LedgerError(
            f"step {plan.step}: token id {outcome.token_ids.max()} of a vocabulary of {vocab_size}"
        )
    pooled = ((plan.rows.mode == POOL) & outcome.rows.ok).nonzero()[0].tolist()
    if list(outcome.pooled) != pooled:
        raise LedgerError(f"step {plan.step}: vectors of {list(outcome.pooled)}, not of {pooled}")
    for row, vector in outcome.pooled.items():
        labels = plan.tenancies[row].seq.request.label_ids
        if labels and len(vector) != _LOGIT_BYTES * len(labels):
            raise LedgerError(f"step {plan.step}: {len(vector)} bytes for {len(labels)} labels")


class OpenRows(NamedTuple):
    """The rows of a step whose tenancies are open; parallel columns [R]."""

    plan_row: IntArray
    tenancies: list[Tenancy]
    planned: PlanRows
    result: ResultRows
    retry: BoolArray  # its logits were not finite, for the first time: it is computed again
    end: IntArray  # of its window in `token_ids`
    stopped: BoolArray  # the window ends with a stop id of its request

    @property
    def slot(self) -> IntArray:
        return self.planned.slot


def open_rows(state: SchedulerState, plan: Plan, outcome: Outcome) -> OpenRows:
    """Pick the open rows of a plan, with what the outcome reports of each.

    Raises LedgerError, or NonFiniteLogits when the workers compute nonsense.
    """
    plan_row = state.slots.open[plan.rows.slot].nonzero()[0]
    tenancies, result = plan.tenancies[plan_row], outcome.rows.take(plan_row)
    return OpenRows(
        plan_row=plan_row,
        tenancies=tenancies.tolist(),
        planned=plan.rows.take(plan_row),
        result=result,
        retry=_retry(state, result.non_finite, tenancies),
        end=outcome.rows.n_emitted.cumsum()[plan_row],
        stopped=_stopped(state, plan, outcome)[plan_row],
    )


def _retry(
    state: SchedulerState, failed: BoolArray, tenancies: npt.NDArray[np.object_]
) -> BoolArray:
    """Return which of the `failed` rows [R] are computed again: those with their first failure.

    Raises NonFiniteLogits when the workers are to be replaced; that is the second chance then.
    """
    retry = failed.copy()
    if failed.any():
        seqs = [tenancy.seq for tenancy in tenancies[failed]]
        retry[failed] = [seq.num_non_finite == 0 for seq in seqs]
        for seq in seqs:
            seq.num_non_finite += 1
        state.non_finite.observe(int(retry.sum()), state.counters.steps)
    return retry


def _stopped(state: SchedulerState, plan: Plan, outcome: Outcome) -> BoolArray:
    """Return which rows end with a stop id of their request. Raises LedgerError if one goes on."""
    stopped = np.zeros(len(plan.rows), dtype=np.bool_)
    suspects = state.stop_ids[outcome.token_ids].nonzero()[0]
    if not len(suspects):
        return stopped
    end = outcome.rows.n_emitted.cumsum()
    for row in np.unique(end.searchsorted(suspects, side="right")).tolist():
        tenancy = plan.tenancies[row]
        window = outcome.token_ids[end[row] - outcome.rows.n_emitted[row] : end[row]].tolist()
        stopped[row] = not tenancy.stop_ids.isdisjoint(window)
        is_open = state.slots.open[tenancy.slot]
        if is_open and not tenancy.stop_ids.isdisjoint(window[:-1]):
            raise LedgerError(f"step {plan.step}, slot {tenancy.slot}: tokens behind a stop id")
    return stopped
