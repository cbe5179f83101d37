"""What a result means: the ledger is settled, tokens are committed, requests end."""

from __future__ import annotations

from array import array
from itertools import compress
from typing import NamedTuple

import numpy as np
from surestep_common.errors import ModelFault
from surestep_common.invariants import (
    DECODE,
    PREFILL_LAST,
    BoolArray,
    IntArray,
    LedgerError,
    check_digests,
    check_result_rows,
    check_step,
    drafter_watermark,
    folded_length,
    require,
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
    _check_columns(plan, outcome, state.limits.vocab_size)
    rows = _live_rows(state, plan, outcome)
    taken = _settle(state, plan, outcome, rows)
    outputs = _emit(state, outcome, rows)
    _publish(state, rows)
    _publish_snapshots(state, plan, taken)
    if state.limits.drafter_has_state:
        _mark_drafted(state, rows)
    state.acknowledge(plan)
    for output in outputs:
        if output.finish is not None or output.error is not None:
            reason = output.finish.name.lower() if output.finish is not None else "error"
            state.counters.finished[reason] += 1
            state.close(output.seq)
    state.sweep()
    return outputs


def _check_columns(plan: Plan, outcome: Outcome, vocab_size: int) -> None:
    same = np.array_equal(outcome.slot, plan.slot)
    if not same or not np.array_equal(outcome.slot_epoch, plan.slot_epoch):
        raise LedgerError(f"step {plan.step}: the result's rows are not the plan's")
    columns = (
        *(outcome.ok, outcome.len_before, outcome.draft_upto),
        *(outcome.n_drafts, outcome.n_accepted, outcome.n_emitted),
    )
    if any(len(column) != len(plan.rows) for column in columns):
        raise LedgerError(f"step {plan.step}: columns of unequal length")
    if len(outcome.token_ids) != outcome.n_emitted.sum():
        raise LedgerError(f"step {plan.step}: token ids and counts differ")
    if outcome.token_ids.max(initial=0) >= vocab_size:
        raise LedgerError(
            f"step {plan.step}: token id {outcome.token_ids.max()} of a vocabulary of {vocab_size}"
        )


class _Rows(NamedTuple):
    """The rows of a step whose tenancies are open; parallel columns [R]."""

    planned: IntArray  # row of the plan
    tenancies: list[Tenancy]
    slot: IntArray
    mode: IntArray
    ok: BoolArray
    len_before: IntArray
    n_drafts: IntArray
    n_accepted: IntArray
    n_emitted: IntArray
    end: IntArray  # of its window in `token_ids`
    stopped: BoolArray  # the window ends with a stop id of its request


def _live_rows(state: SchedulerState, plan: Plan, outcome: Outcome) -> _Rows:
    planned = state.slots.open[plan.slot].nonzero()[0]
    return _Rows(
        planned=planned,
        tenancies=plan.rows[planned].tolist(),
        slot=plan.slot[planned],
        mode=plan.mode[planned],
        ok=outcome.ok[planned],
        len_before=outcome.len_before[planned],
        n_drafts=outcome.n_drafts[planned],
        n_accepted=outcome.n_accepted[planned],
        n_emitted=outcome.n_emitted[planned],
        end=outcome.n_emitted.cumsum()[planned],
        stopped=_stopped(state, plan, outcome)[planned],
    )


def _stopped(state: SchedulerState, plan: Plan, outcome: Outcome) -> BoolArray:
    """Rows whose window holds a stop id of their request. Raises LedgerError if it goes on."""
    stopped = np.zeros(len(plan.rows), dtype=np.bool_)
    suspects = state.stop_ids[outcome.token_ids].nonzero()[0]
    if not len(suspects):
        return stopped
    end = outcome.n_emitted.cumsum()
    for row in np.unique(end.searchsorted(suspects, side="right")).tolist():
        tenancy = plan.rows[row]
        window = outcome.token_ids[end[row] - outcome.n_emitted[row] : end[row]].tolist()
        stopped[row] = not tenancy.stop_ids.isdisjoint(window)
        is_open = state.slots.open[tenancy.slot]
        if is_open and not tenancy.stop_ids.isdisjoint(window[:-1]):
            raise LedgerError(f"step {plan.step}, slot {tenancy.slot}: tokens behind a stop id")
    return stopped


def _settle(state: SchedulerState, plan: Plan, outcome: Outcome, rows: _Rows) -> BoolArray:
    """Check the rows against the scheduler's own books, then write them down.

    Returns which of the plan's snapshots [S] were taken.
    """
    slots, planned = state.slots, rows.planned
    advance = check_result_rows(
        slot=rows.slot,
        mode=rows.mode,
        num_tokens=plan.num_tokens[planned],
        k_cap=plan.k_cap[planned],
        ok=rows.ok,
        len_before=rows.len_before,
        n_drafts=rows.n_drafts,
        n_accepted=rows.n_accepted,
        n_emitted=rows.n_emitted,
        ends_with_stop=rows.stopped,
        committed=slots.committed[rows.slot],
    )
    draft_upto = _watermark(state, plan, outcome, rows)
    folded = folded_length(rows.mode, rows.len_before, advance)
    taken = _taken(state, plan, outcome, rows, folded)
    slots.settle(plan.step, rows.slot, plan.width[planned], advance, rows.n_accepted)
    slots.follow(rows.slot, folded, draft_upto)
    drafts = rows.n_drafts * rows.ok
    # Drafts behind a stop id were never emitted.
    accepted = np.minimum(rows.n_accepted, rows.n_emitted)
    state.speculation.observe(rows.slot, drafts, rows.n_accepted)
    slots.count(rows.slot, rows.n_emitted > 0, drafts, accepted)
    state.counters.count(rows.n_emitted, drafts, accepted)
    return taken


def _watermark(state: SchedulerState, plan: Plan, outcome: Outcome, rows: _Rows) -> IntArray:
    """Where the drafter's state of the rows has come to; all 0 for one without state."""
    before = state.slots.draft_upto[rows.slot]
    if not state.limits.drafter_has_state:
        return before
    after = drafter_watermark(
        slot=rows.slot,
        mode=rows.mode,
        catch_up=plan.catch_up[rows.planned],
        len_before=rows.len_before,
        draft_upto=before,
    )
    reported = outcome.draft_upto[rows.planned]
    message = "the drafter's state covers {} tokens, reported are {}"
    require((reported == after) | ~rows.ok, rows.slot, message, after, reported)
    return after


def _taken(
    state: SchedulerState, plan: Plan, outcome: Outcome, rows: _Rows, folded: IntArray
) -> BoolArray:
    """Snapshots [S] of open tenancies that the state has passed, `folded` being where it is now.

    A row that failed takes none: its request has ended.
    """
    row, length, ids = plan.arms
    if not len(row):
        return np.zeros(0, dtype=np.bool_)
    slot, after = plan.slot[row], np.full(len(plan.rows), -1)
    after[rows.planned] = np.where(rows.ok, folded, -1)
    taken = (state.slots.folded[slot] < length) & (length <= after[row])
    reported = np.isin(ids, outcome.snapshot_ids_taken)
    message = "snapshot {} at length {}: taken {}, reported {}"
    agreed = (reported == taken) | (after[row] < 0)
    require(agreed, slot, message, ids, length, taken.astype(np.int64), reported.astype(np.int64))
    return taken


def _emit(state: SchedulerState, outcome: Outcome, rows: _Rows) -> list[Output]:
    """Hand the tokens to their sequences. What few rows need is found by column."""
    outputs, token_ids = [], array("I", outcome.token_ids.tobytes())
    starts, ends = (rows.end - rows.n_emitted).tolist(), rows.end.tolist()
    for tenancy, start, end in zip(rows.tenancies, starts, ends, strict=True):
        seq, window = tenancy.seq, token_ids[start:end]
        seq.tokens.extend(window)
        outputs.append(Output(seq, window))
    slots, emits = state.slots, rows.n_emitted > 0
    full = emits & (slots.committed[rows.slot] + 1 >= slots.max_len[rows.slot])
    for row in full.nonzero()[0].tolist():
        outputs[row].finish = Finish.LENGTH
    for row in rows.stopped.nonzero()[0].tolist():
        outputs[row].finish = Finish.STOP
    for row in (~rows.ok).nonzero()[0].tolist():
        outputs[row].error = ModelFault("the model's logits were not usable")
    if outcome.logprobs or outcome.prompt_logprobs:
        for output, row in zip(outputs, rows.planned.tolist(), strict=True):
            output.logprobs = outcome.logprobs.get(row)
            _collect(output.seq, outcome.prompt_logprobs.get(row))
    for row in (rows.mode == PREFILL_LAST).nonzero()[0].tolist():
        seq = rows.tenancies[row].seq
        outputs[row].prompt_logprobs, seq.prompt_logprobs = seq.prompt_logprobs, None
    return list(compress(outputs, (emits | ~rows.ok).tolist()))


def _collect(seq: Sequence, logprobs: Logprobs | None) -> None:
    if logprobs is None or not seq.needs_prompt_logprobs:
        return
    if seq.prompt_logprobs is None:
        seq.prompt_logprobs = Logprobs()
    seq.prompt_logprobs.extend(logprobs)


def _publish(state: SchedulerState, rows: _Rows) -> None:
    """Share blocks full of committed tokens: nothing in flight can write them again."""
    slots, size = state.slots, state.limits.block_size
    ready = (slots.committed[rows.slot] >= slots.publish_at[rows.slot]).nonzero()[0]
    slot = rows.slot[ready]
    since, full = slots.publish_at[slot] // size - 1, slots.committed[slot] // size
    slots.publish_at[slot] = (full + 1) * size
    if not state.limits.enable_prefix_caching:
        return
    for row, first, end in zip(ready.tolist(), since.tolist(), full.tolist(), strict=True):
        seq, blocks = rows.tenancies[row].seq, rows.tenancies[row].blocks
        prefix.publish(state.pool, seq.chain, seq.tokens, blocks, first, end)


def _mark_drafted(state: SchedulerState, rows: _Rows) -> None:
    """Remember of which blocks the drafter's part is complete, for those that share them later."""
    slots, size = state.slots, state.limits.block_size
    ready = (slots.draft_upto[rows.slot] >= slots.mark_at[rows.slot]).nonzero()[0]
    slot = rows.slot[ready]
    since, full = slots.mark_at[slot] // size - 1, slots.draft_upto[slot] // size
    slots.mark_at[slot] = (full + 1) * size
    for row, first, end in zip(ready.tolist(), since.tolist(), full.tolist(), strict=True):
        state.pool.mark_drafted(rows.tenancies[row].blocks[first:end])


def _publish_snapshots(state: SchedulerState, plan: Plan, taken: BoolArray) -> None:
    """Make the states behind committed prefixes findable.

    Of those taken while a request decodes only the newest is kept: the next turn of its
    conversation starts there.
    """
    if not taken.any():
        return
    size, keys = state.limits.block_size, state.slots.snapshot_key
    for row, length, snapshot in zip(*(c[taken].tolist() for c in plan.arms), strict=True):
        seq, slot, num_blocks = plan.rows[row].seq, plan.slot[row], length // size
        (key,) = seq.chain.keys(seq.tokens, num_blocks - 1, num_blocks)
        is_new = state.snapshots.publish(snapshot, key, num_blocks)
        if is_new and plan.mode[row] >= DECODE:
            state.snapshots.forget(keys[slot])
            keys[slot] = key
