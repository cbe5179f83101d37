"""Apply a step's result: settle the ledger, commit tokens, finish requests."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from itertools import compress
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from surestep_common.errors import InvalidRequest, ModelFault, SurestepError
from surestep_common.invariants import (
    POOL,
    PREFILL_LAST,
    BoolArray,
    IntArray,
    LedgerError,
    PlanRows,
    ResultRows,
    check_digests,
    check_drafter_faults,
    check_result_rows,
    check_step,
    drafter_watermark,
    folded_length,
    require,
)
from surestep_common.request_params import shapes_logits

from surestep_scheduler.cache import prefix

from .messages import Outcome, Plan
from .sequence import Finish, Output, Sequence, Tenancy, TokenLogprobs
from .state import SchedulerState

_LOGIT_BYTES = 4


def commit_result(state: SchedulerState, outcome: Outcome) -> list[Output]:
    """Commit the result of the oldest plan in flight.

    Results of another epoch, and rows of tenancies that have ended, are dropped: their tokens were
    discarded when the epoch or tenancy ended. Raises LedgerError when an invariant is broken and
    NonFiniteLogits when the workers compute nonsense, with nothing committed, after which the epoch
    must be fenced.
    """
    if outcome.epoch != state.epoch:
        return []
    if not state.in_flight:
        raise LedgerError(f"step {outcome.step} is answered, but none is in flight")
    plan = state.in_flight[0]
    check_step(plan.step, outcome.step)
    check_digests(outcome.step, outcome.digests)
    state.counters.checked_digests += len(outcome.digests) - 1
    check_columns(plan, outcome, state.limits.vocab_size)
    rows = open_rows(state, plan, outcome)
    _check_logprobs(state, outcome, rows)
    _settle_drafter(state, plan, outcome)
    taken = _settle(state, plan, outcome, rows)
    outputs = _emit(state, outcome, rows)
    _publish(state, rows)
    state.tables.give_back(rows.slot)
    _publish_snapshots(state, plan, taken)
    if state.limits.drafter_has_state:
        _mark_drafted(state, rows)
    state.missed_kind = outcome.missed_kind
    state.acknowledge(plan)
    for output in outputs:
        if output.finish is not None or output.error is not None:
            reason = output.finish.name.lower() if output.finish is not None else "error"
            state.end(output.seq, reason)
    for row in rows.retry.nonzero()[0].tolist():
        state.retry(rows.tenancies[row])
    state.sweep()
    return outputs


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


def _settle(state: SchedulerState, plan: Plan, outcome: Outcome, rows: OpenRows) -> BoolArray:
    """Check the rows against the scheduler's own books, then enter them.

    Returns which of the plan's snapshots [S] were taken.
    """
    slots, planned, result, slot = state.slots, rows.planned, rows.result, rows.slot
    advance = check_result_rows(
        planned, result, committed=slots.committed[slot], ends_with_stop=rows.stopped
    )
    drafter_len = _watermark(state, plan, outcome, rows)
    folded = folded_length(planned.mode, result.len_before, advance)
    taken = _taken(state, plan, outcome, rows, folded)
    slots.settle(plan.step, slot, plan.width[rows.plan_row], advance, result.n_accepted)
    slots.follow(slot, folded, drafter_len)
    drafts, drafts_emitted = result.n_drafts * result.ok, result.n_drafts_emitted
    tried = np.where(result.n_forced > 0, 0, drafts)  # others say nothing of the drafter
    asked, found = planned.max_looked_up > 0, result.n_looked_up > 0
    state.speculation.observe(slot, tried, result.n_accepted, found)
    state.speculation.finds.observe(slot[asked], found[asked])
    slots.count(slot, result.n_emitted > 0, drafts, drafts_emitted)
    counts = advance, result.n_emitted, drafts, drafts_emitted
    state.counters.count(*counts, mode=planned.mode, max_drafts=planned.max_drafts)
    return taken


def _settle_drafter(state: SchedulerState, plan: Plan, outcome: Outcome) -> None:
    """Suspend a drafter that failed; requests whose drafts are not finite get no more."""
    faults = outcome.drafter_faults
    check_drafter_faults(
        known=plan.drafter_faults,
        before=state.drafter_faults,
        after=faults,
        skipped=outcome.drafter_skipped,
    )
    if outcome.drafter_skipped:
        if (outcome.rows.n_drafts > outcome.rows.n_forced).any():
            raise LedgerError(f"step {plan.step}: drafts without a drafter")
        state.counters.drafter_faults += 1
    if faults > state.drafter_faults:
        state.drafter_faults = faults
        state.speculation.suspend("the drafter failed")
    for row in outcome.draft_non_finite_rows:
        tenancy = plan.tenancies[row]
        state.counters.drafter_faults += tenancy.seq.may_draft
        tenancy.seq.may_draft = False
        state.slots.draft_cap[tenancy.slot] = 0


def _watermark(state: SchedulerState, plan: Plan, outcome: Outcome, rows: OpenRows) -> IntArray:
    """Return the positions [R] that the drafter's state covers; 0 for a drafter without state."""
    before = state.slots.drafter_len[rows.slot]
    if not state.limits.drafter_has_state or outcome.drafter_skipped:
        return before
    result = rows.result
    after = drafter_watermark(rows.planned, len_before=result.len_before, drafter_len=before)
    reported = result.drafter_len
    message = "the drafter's state covers {} tokens, reported are {}"
    require((reported == after) | ~result.ok, rows.slot, message, after, reported)
    return after


def _taken(
    state: SchedulerState, plan: Plan, outcome: Outcome, rows: OpenRows, folded: IntArray
) -> BoolArray:
    """Return which requested snapshots [S] the state has passed; `folded` is its length now.

    A row that failed takes none: its request has ended.
    """
    row, length, ids = plan.snapshot_requests
    if not len(row):
        return np.zeros(0, dtype=np.bool_)
    slot, after = plan.rows.slot[row], np.full(len(plan.rows), -1)
    after[rows.plan_row] = np.where(rows.result.ok, folded, -1)
    taken = (state.slots.folded[slot] < length) & (length <= after[row])
    reported = np.isin(ids, outcome.snapshot_ids_taken)
    message = "snapshot {} at length {}: taken {}, reported {}"
    agreed = (reported == taken) | (after[row] < 0)
    require(agreed, slot, message, ids, length, taken.astype(np.int64), reported.astype(np.int64))
    return taken


def _emit(state: SchedulerState, outcome: Outcome, rows: OpenRows) -> list[Output]:
    """Hand the tokens to their sequences, and return the outputs of rows that have any."""
    outputs, token_ids = [], array("I", outcome.token_ids.tobytes())
    starts, ends = (rows.end - rows.result.n_emitted).tolist(), rows.end.tolist()
    drafted = rows.result.n_drafts_emitted.tolist()
    for tenancy, start, end, count in zip(rows.tenancies, starts, ends, drafted, strict=True):
        seq, window = tenancy.seq, token_ids[start:end]
        seq.tokens.extend(window)
        outputs.append(Output(seq, window, count))
    slots, emits = state.slots, rows.result.n_emitted > 0
    full = emits & (slots.committed[rows.slot] + 1 >= slots.max_len[rows.slot])
    for row in full.nonzero()[0].tolist():
        outputs[row].finish = Finish.LENGTH
    for row in rows.stopped.nonzero()[0].tolist():
        outputs[row].finish = Finish.STOP
    pooled = _pooled(outcome, rows, outputs)
    failed = ~rows.result.ok & ~rows.retry
    for row in failed.nonzero()[0].tolist():
        fault = outcome.grammar_faults.get(int(rows.plan_row[row]), "")
        outputs[row].error = _failure(rows.result.non_finite[row], outputs[row].seq, fault)
    if outcome.logprobs or outcome.prompt_logprobs:
        for output, row in zip(outputs, rows.plan_row.tolist(), strict=True):
            output.logprobs = outcome.logprobs.get(row)
            _collect(output.seq, outcome.prompt_logprobs.get(row))
    for row in (rows.planned.mode == PREFILL_LAST).nonzero()[0].tolist():
        seq = rows.tenancies[row].seq
        outputs[row].prompt_logprobs, seq.prompt_logprobs = seq.prompt_logprobs, None
    return list(compress(outputs, (emits | pooled | failed).tolist()))


def _pooled(outcome: Outcome, rows: OpenRows, outputs: list[Output]) -> BoolArray:
    """Put vectors into the outputs; return which of the rows [R] end with one."""
    if not outcome.pooled:
        return np.zeros(len(rows.plan_row), dtype=np.bool_)
    pooled = np.isin(rows.plan_row, list(outcome.pooled))
    for row in pooled.nonzero()[0].tolist():
        outputs[row].pooled = outcome.pooled[int(rows.plan_row[row])]
        outputs[row].finish = Finish.POOLED
    return pooled


def _failure(non_finite: bool, seq: Sequence, grammar_fault: str) -> SurestepError:
    """Return the error of a row without a token: the model's fault, or the request's own."""
    if grammar_fault:
        return InvalidRequest(grammar_fault, param="grammar")
    if non_finite or not shapes_logits(seq.request.sampling):
        return ModelFault("the model's logits were not usable")
    return InvalidRequest(
        "this request's own logit_bias, penalties, bad_words, allowed_token_ids, min_tokens and "
        "grammar leave no token that could be chosen"
    )


def _check_logprobs(state: SchedulerState, outcome: Outcome, rows: OpenRows) -> None:
    """Require the log-probabilities of each token, and of each position of a prompt, that its
    request asks for."""
    for index in state.slots.scored[rows.slot].nonzero()[0].tolist():
        tenancy, row = rows.tenancies[index], int(rows.plan_row[index])
        seq, num_emitted = tenancy.seq, int(rows.result.n_emitted[index])
        if seq.request.want_logprobs:
            known = _num_scored(outcome.logprobs.get(row))
            _require_scores(tenancy, "tokens", num_emitted, known)
        ends_prompt = rows.planned.mode[index] == PREFILL_LAST
        if seq.needs_prompt_logprobs and ends_prompt and num_emitted:
            known = _num_scored(seq.prompt_logprobs) + _num_scored(outcome.prompt_logprobs.get(row))
            _require_scores(tenancy, "a prompt's positions", seq.prompt_len - 1, known)


def _require_scores(tenancy: Tenancy, what: str, count: int, known: int) -> None:
    if known != count:
        raise LedgerError(f"slot {tenancy.slot}: {known} log-probabilities of {count} {what}")


def _num_scored(logprobs: TokenLogprobs | None) -> int:
    return 0 if logprobs is None else len(logprobs.token_id)


def _collect(seq: Sequence, logprobs: TokenLogprobs | None) -> None:
    if logprobs is None or not seq.needs_prompt_logprobs:
        return
    if seq.prompt_logprobs is None:
        seq.prompt_logprobs = TokenLogprobs()
    seq.prompt_logprobs.extend(logprobs)


def _publish(state: SchedulerState, rows: OpenRows) -> None:
    """Share blocks full of committed tokens: nothing in flight can write them again."""
    slots, size = state.slots, state.limits.block_size
    for row, first, end in _newly_full(slots.committed, slots.publish_at, rows.slot, size):
        seq, tables = rows.tenancies[row].seq, rows.tenancies[row].tables
        if state.limits.enable_prefix_caching:
            prefix.publish(state.pool, seq.chain, seq.tokens, tables, first, end)


def _mark_drafted(state: SchedulerState, rows: OpenRows) -> None:
    """Mark the blocks whose drafter rows are complete, for requests that share them later.

    A drafter that is recurrent begins with the first token all the same.
    """
    slots, size = state.slots, state.limits.block_size
    for row, first, end in _newly_full(slots.drafter_len, slots.mark_at, rows.slot, size):
        if not state.limits.drafter_recurrent:
            state.pool.mark_drafted(rows.tenancies[row].tables[0].held(first, end))


def _newly_full(
    length: IntArray, due: IntArray, slot: IntArray, size: int
) -> Iterator[tuple[int, int, int]]:
    """Return the rows whose slots [R] filled blocks, with the first of these blocks and their end.

    `length` and `due` are columns by slot: so many tokens there are, so many fill the next block.
    """
    ready = (length[slot] >= due[slot]).nonzero()[0]
    filled = slot[ready]
    first, end = due[filled] // size - 1, length[filled] // size
    due[filled] = (end + 1) * size
    return zip(ready.tolist(), first.tolist(), end.tolist(), strict=True)


def _publish_snapshots(state: SchedulerState, plan: Plan, taken: BoolArray) -> None:
    """Make the states behind committed prefixes findable.

    Of those taken while a request decodes only the newest is kept: the next turn of its
    conversation starts there.
    """
    if not taken.any():
        return
    size, keys = state.limits.block_size, state.slots.snapshot_key
    decoding = ~plan.rows.is_prefill
    requests = (column[taken].tolist() for column in plan.snapshot_requests)
    for row, length, snapshot in zip(*requests, strict=True):
        seq, slot, num_blocks = plan.tenancies[row].seq, plan.rows.slot[row], length // size
        (key,) = seq.chain.keys(seq.tokens, num_blocks - 1, num_blocks)
        state.counters.snapshots_taken += 1
        is_new = state.snapshots.publish(snapshot, key, num_blocks)
        if is_new and decoding[row]:
            state.snapshots.forget(keys[slot])
            keys[slot] = key
