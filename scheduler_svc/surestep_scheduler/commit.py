"""What a result means: the ledger is settled, tokens are committed, requests end."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from itertools import pairwise

import numpy as np
from surestep_common.errors import ModelFault
from surestep_common.invariants import (
    IntArray,
    LedgerError,
    check_digests,
    check_result_rows,
    check_step,
)

from . import prefix
from .messages import Outcome, Plan
from .sequence import Finish, Logprobs, Output, Sequence, Tenancy
from .state import SchedulerState


def apply(state: SchedulerState, outcome: Outcome) -> list[Output]:
    """Commit the result of the oldest plan in flight.

    Results of another epoch, and rows of tenancies that have ended, are dropped: their tokens were
    discarded when the epoch or tenancy ended. Raises LedgerError when an invariant is broken, with
    nothing committed, after which the epoch must be fenced.
    """
    if outcome.epoch != state.epoch or not state.in_flight:
        return []
    plan = state.in_flight[0]
    check_step(plan.step, outcome.step)
    check_digests(outcome.step, outcome.digests)
    _check_columns(plan, outcome)
    outputs = _apply_rows(state, plan, outcome)
    state.in_flight.popleft()
    state.applied_step = plan.step
    state.counters.steps += 1
    for output in outputs:
        if output.finish is not None or output.error is not None:
            reason = output.finish.name.lower() if output.finish is not None else "error"
            state.counters.finished[reason] += 1
            state.close(output.seq)
    state.sweep()
    return outputs


def _check_columns(plan: Plan, outcome: Outcome) -> None:
    same = np.array_equal(outcome.slot, plan.slot)
    if not same or not np.array_equal(outcome.slot_epoch, plan.slot_epoch):
        raise LedgerError(f"step {plan.step}: the result's rows are not the plan's")
    columns = (outcome.ok, outcome.len_before, outcome.n_drafts, outcome.n_accepted)
    if any(len(column) != len(plan.rows) for column in (*columns, outcome.n_emitted)):
        raise LedgerError(f"step {plan.step}: columns of unequal length")
    if len(outcome.token_ids) != outcome.n_emitted.sum():
        raise LedgerError(f"step {plan.step}: token ids and counts differ")


def _apply_rows(state: SchedulerState, plan: Plan, outcome: Outcome) -> list[Output]:
    """Settle and commit the rows whose tenancies are open."""
    live = np.flatnonzero(state.slots.open[plan.slot])
    slot, ok, n_accepted = plan.slot[live], outcome.ok[live], outcome.n_accepted[live]
    n_emitted = outcome.n_emitted[live]
    rows = live.tolist()
    tenancies = [plan.rows[row] for row in rows]
    ends = np.cumsum(outcome.n_emitted).tolist()
    windows = [outcome.token_ids[start:end] for start, end in pairwise([0, *ends])]
    windows = [windows[row] for row in rows]
    stops = _stops(plan.step, tenancies, windows)
    advance = check_result_rows(
        slot=slot,
        mode=plan.mode[live],
        num_tokens=plan.num_tokens[live],
        k_cap=plan.k_cap[live],
        ok=ok,
        len_before=outcome.len_before[live],
        n_drafts=outcome.n_drafts[live],
        n_accepted=n_accepted,
        n_emitted=n_emitted,
        ends_with_stop=np.array(stops, dtype=np.bool_),
        committed=state.slots.committed[slot],
    )
    state.slots.settle(plan.step, slot, plan.width[live], advance, n_accepted)
    verified = ok * outcome.n_drafts[live]
    accepted = np.minimum(n_accepted, n_emitted)  # drafts behind a stop id were never emitted
    state.counters.windows.update(accepted[verified > 0].tolist())
    state.counters.draft_tokens += int(verified.sum())
    state.counters.generation_tokens += int(n_emitted.sum())
    outputs = []
    columns = zip(
        rows, tenancies, windows, stops, ok.tolist(), verified.tolist(), accepted.tolist(),
        strict=True,
    )  # fmt: skip
    for row, tenancy, emitted, stopped, usable, num_drafts, num_accepted in columns:
        seq = tenancy.seq
        if outcome.prompt_logprobs:
            _collect(seq, outcome.prompt_logprobs.get(row))
        if not usable:
            error = ModelFault("the model's logits were not usable")
            outputs.append(Output(seq, [], error=error))
        elif emitted:
            seq.num_drafts += num_drafts
            seq.num_accepted += num_accepted
            outputs.append(_emit(seq, emitted, stopped, outcome.logprobs.get(row)))
    _publish(state, slot, tenancies)
    return outputs


def _stops(step: int, tenancies: Seq[Tenancy], windows: Seq[list[int]]) -> list[bool]:
    """Which windows end with a stop id of their request. Raises LedgerError if one goes on."""
    stops = [
        not tenancy.seq.request.stop_ids.isdisjoint(window)
        for tenancy, window in zip(tenancies, windows, strict=True)
    ]
    for tenancy, window, stopped in zip(tenancies, windows, stops, strict=True):
        if stopped and not tenancy.seq.request.stop_ids.isdisjoint(window[:-1]):
            raise LedgerError(f"step {step}, slot {tenancy.slot}: tokens behind a stop id")
    return stops


def _collect(seq: Sequence, logprobs: Logprobs | None) -> None:
    if logprobs is None or not seq.needs_prompt_logprobs:
        return
    if seq.prompt_logprobs is None:
        seq.prompt_logprobs = Logprobs()
    seq.prompt_logprobs.extend(logprobs)


def _emit(seq: Sequence, emitted: list[int], stopped: bool, logprobs: Logprobs | None) -> Output:
    """Append tokens to the sequence."""
    seq.tokens += emitted
    seq.num_steps += 1
    seq.fruitless_replays = 0
    finish = None
    if stopped:
        finish = Finish.STOP
    elif len(seq.tokens) >= seq.max_len:
        finish = Finish.LENGTH
    prompt_logprobs, seq.prompt_logprobs = seq.prompt_logprobs, None
    return Output(seq, emitted, logprobs, prompt_logprobs, finish)


def _publish(state: SchedulerState, slot: IntArray, tenancies: Seq[Tenancy]) -> None:
    """Share blocks full of committed tokens: nothing in flight can write them again."""
    slots, size = state.slots, state.limits.block_size
    ready = np.flatnonzero(slots.committed[slot] >= slots.publish_at[slot])
    since = slots.publish_at[slot[ready]] // size - 1
    full = slots.committed[slot[ready]] // size
    slots.publish_at[slot[ready]] = (full + 1) * size
    if not state.limits.enable_prefix_caching:
        return
    for row, first, end in zip(ready.tolist(), since.tolist(), full.tolist(), strict=True):
        seq, blocks = tenancies[row].seq, tenancies[row].blocks
        prefix.publish(state.pool, seq.chain, seq.tokens, blocks, first, end)
