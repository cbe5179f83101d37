"""What a result means: the ledger is settled, tokens are committed, requests end."""

from __future__ import annotations

from surestep_common.errors import ModelFault
from surestep_common.invariants import LedgerError, check_digests, check_result_row, check_step

from . import prefix
from .messages import Outcome, Plan
from .sequence import Logprobs, Output, Sequence, Tenancy
from .state import SchedulerState


def apply(state: SchedulerState, outcome: Outcome) -> list[Output]:
    """Commit the result of the oldest plan in flight.

    Results of another epoch, and rows of tenancies that have ended, are dropped: their tokens were
    discarded when the epoch or tenancy ended. Raises LedgerError when an invariant is broken, after
    which the epoch must be fenced.
    """
    if outcome.epoch != state.epoch or not state.in_flight:
        return []
    plan = state.in_flight[0]
    check_step(plan.step, outcome.step)
    check_digests(outcome.step, outcome.digests)
    _check_rows(plan, outcome)
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


def _check_rows(plan: Plan, outcome: Outcome) -> None:
    if outcome.slot != plan.slot or outcome.slot_epoch != plan.slot_epoch:
        raise LedgerError(f"step {plan.step}: the result's rows are not the plan's")
    columns = (outcome.ok, outcome.len_before, outcome.n_drafts, outcome.n_accepted)
    if any(len(column) != len(plan.rows) for column in (*columns, outcome.n_emitted)):
        raise LedgerError(f"step {plan.step}: columns of unequal length")
    if len(outcome.token_ids) != sum(outcome.n_emitted):
        raise LedgerError(f"step {plan.step}: token ids and counts differ")


def _apply_rows(state: SchedulerState, plan: Plan, outcome: Outcome) -> list[Output]:
    outputs = []
    start = 0
    for row, tenancy in enumerate(plan.rows):
        end = start + outcome.n_emitted[row]
        if tenancy.open:
            output = _apply_row(state, plan, outcome, row, outcome.token_ids[start:end])
            if output is not None:
                outputs.append(output)
        start = end
    return outputs


def _apply_row(
    state: SchedulerState, plan: Plan, outcome: Outcome, row: int, emitted: list[int]
) -> Output | None:
    tenancy, width = plan.rows[row], plan.width[row]
    seq = tenancy.seq
    stop_ids = seq.request.stop_ids
    advance = check_result_row(
        mode=plan.mode[row],
        num_tokens=plan.num_tokens[row],
        k_cap=plan.k_cap[row],
        ok=outcome.ok[row],
        len_before=outcome.len_before[row],
        n_drafts=outcome.n_drafts[row],
        n_accepted=outcome.n_accepted[row],
        n_emitted=len(emitted),
        ends_with_stop=bool(emitted) and emitted[-1] in stop_ids,
        committed=tenancy.committed,
    )
    tenancy.ledger.settle(width, advance)
    tenancy.committed += advance
    tenancy.len_hi -= width - advance
    tenancy.applied_step = plan.step
    tenancy.accepted = outcome.n_accepted[row]
    if not outcome.ok[row]:
        return Output(seq, [], error=ModelFault("the model's logits were not usable"))
    if row in outcome.prompt_logprobs:
        _collect(seq, outcome.prompt_logprobs[row])
    if not emitted:
        _publish(state, tenancy)
        return None
    if not stop_ids.isdisjoint(emitted[:-1]):
        raise LedgerError(f"step {plan.step}: tokens behind a stop id")
    _count(state, seq, len(emitted), outcome.n_drafts[row], outcome.n_accepted[row])
    seq.tokens += emitted
    _publish(state, tenancy)
    prompt_logprobs, seq.prompt_logprobs = seq.prompt_logprobs, None
    return Output(seq, emitted, outcome.logprobs.get(row), prompt_logprobs, seq.finish())


def _collect(seq: Sequence, logprobs: Logprobs) -> None:
    if not seq.needs_prompt_logprobs:
        return
    if seq.prompt_logprobs is None:
        seq.prompt_logprobs = Logprobs()
    seq.prompt_logprobs.extend(logprobs)


def _count(
    state: SchedulerState, seq: Sequence, n_emitted: int, n_drafts: int, n_accepted: int
) -> None:
    counters = state.counters
    counters.generation_tokens += n_emitted
    seq.num_steps += 1
    seq.fruitless_replays = 0
    if n_drafts:
        n_accepted = min(n_accepted, n_emitted)  # drafts behind a stop id were never emitted
        counters.windows[n_accepted] += 1
        counters.draft_tokens += n_drafts
        seq.num_drafts += n_drafts
        seq.num_accepted += n_accepted


def _publish(state: SchedulerState, tenancy: Tenancy) -> None:
    """Share blocks full of committed tokens: nothing in flight can write them again."""
    full = tenancy.committed // state.limits.block_size
    if full > tenancy.num_published and state.limits.enable_prefix_caching:
        seq, since = tenancy.seq, tenancy.num_published
        prefix.publish(state.pool, seq.chain, seq.tokens, tenancy.blocks, since, full)
        tenancy.num_published = full
