"""What a result means: the ledger is settled, tokens are committed, requests end."""

from __future__ import annotations

from surestep_common.errors import ModelFault
from surestep_common.invariants import LedgerError, check_digests, check_result_row, check_step

from . import prefix
from .messages import Outcome, Plan
from .sequence import Finish, Logprobs, Output, Sequence, Tenancy
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
    _check_columns(plan, outcome)
    outputs = _apply_rows(state, plan, outcome)
    state.in_flight.popleft()
    state.applied_step = plan.step
    state.counters.steps += 1
    state.counters.generation_tokens += sum(len(output.token_ids) for output in outputs)
    for output in outputs:
        if output.finish is not None or output.error is not None:
            reason = output.finish.name.lower() if output.finish is not None else "error"
            state.counters.finished[reason] += 1
            state.close(output.seq)
    state.sweep()
    return outputs


def _check_columns(plan: Plan, outcome: Outcome) -> None:
    if outcome.slot != plan.slot or outcome.slot_epoch != plan.slot_epoch:
        raise LedgerError(f"step {plan.step}: the result's rows are not the plan's")
    columns = (outcome.ok, outcome.len_before, outcome.n_drafts, outcome.n_accepted)
    if any(len(column) != len(plan.rows) for column in (*columns, outcome.n_emitted)):
        raise LedgerError(f"step {plan.step}: columns of unequal length")
    if len(outcome.token_ids) != sum(outcome.n_emitted):
        raise LedgerError(f"step {plan.step}: token ids and counts differ")


def _apply_rows(state: SchedulerState, plan: Plan, outcome: Outcome) -> list[Output]:
    """Settle and commit every row; the one loop over rows, so that it looks everything up once."""
    outputs, windows, num_drafts = list[Output](), list[int](), 0
    step, token_ids, end = plan.step, outcome.token_ids, 0
    columns = zip(
        plan.rows, plan.mode, plan.num_tokens, plan.k_cap, plan.width, outcome.ok,
        outcome.len_before, outcome.n_drafts, outcome.n_accepted, outcome.n_emitted, strict=True,
    )  # fmt: skip
    for row, columns_of_row in enumerate(columns):
        tenancy, mode, num_tokens, k_cap, width, ok, before, drafts, accepted, count = (
            columns_of_row
        )
        start, end = end, end + count
        if not tenancy.open:
            continue
        emitted = token_ids[start:end]
        stops = not tenancy.stop_ids.isdisjoint(emitted)
        advance = check_result_row(
            mode=mode,
            num_tokens=num_tokens,
            k_cap=k_cap,
            ok=ok,
            len_before=before,
            n_drafts=drafts,
            n_accepted=accepted,
            n_emitted=count,
            ends_with_stop=stops,
            committed=tenancy.committed,
        )
        tenancy.ledger.settle(width, advance)
        tenancy.committed += advance
        tenancy.len_hi -= width - advance
        tenancy.applied_step = step
        tenancy.accepted = accepted
        if outcome.prompt_logprobs:
            _collect(tenancy.seq, outcome.prompt_logprobs.get(row))
        if not ok:
            error = ModelFault("the model's logits were not usable")
            outputs.append(Output(tenancy.seq, [], error=error))
            continue
        if emitted:
            output = _emit(tenancy, emitted, stops, outcome.logprobs.get(row))
            outputs.append(output)
            if drafts:
                # Drafts behind a stop id were never emitted.
                emitted_drafts = accepted if accepted < count else count
                output.seq.num_drafts += drafts
                output.seq.num_accepted += emitted_drafts
                windows.append(emitted_drafts)
                num_drafts += drafts
        if tenancy.committed >= tenancy.publish_at:
            _publish(state, tenancy)
    state.counters.windows.update(windows)
    state.counters.draft_tokens += num_drafts
    return outputs


def _collect(seq: Sequence, logprobs: Logprobs | None) -> None:
    if logprobs is None or not seq.needs_prompt_logprobs:
        return
    if seq.prompt_logprobs is None:
        seq.prompt_logprobs = Logprobs()
    seq.prompt_logprobs.extend(logprobs)


def _emit(tenancy: Tenancy, emitted: list[int], stops: bool, logprobs: Logprobs | None) -> Output:
    """Append tokens to the sequence. `stops`: there is a stop id among them, so it must be last."""
    seq = tenancy.seq
    finish = None
    if stops:
        finish = Finish.STOP
        if not tenancy.stop_ids.isdisjoint(emitted[:-1]):
            raise LedgerError(f"step {tenancy.applied_step}: tokens behind a stop id")
    tokens = seq.tokens
    tokens += emitted
    if finish is None and len(tokens) >= tenancy.max_len:
        finish = Finish.LENGTH
    seq.num_steps += 1
    seq.fruitless_replays = 0
    if seq.prompt_logprobs is None:
        return Output(seq, emitted, logprobs, None, finish)
    prompt_logprobs, seq.prompt_logprobs = seq.prompt_logprobs, None
    return Output(seq, emitted, logprobs, prompt_logprobs, finish)


def _publish(state: SchedulerState, tenancy: Tenancy) -> None:
    """Share blocks full of committed tokens: nothing in flight can write them again."""
    size = state.limits.block_size
    since, full = tenancy.publish_at // size - 1, tenancy.committed // size
    tenancy.publish_at = (full + 1) * size
    if state.limits.enable_prefix_caching:
        seq = tenancy.seq
        prefix.publish(state.pool, seq.chain, seq.tokens, tenancy.blocks, since, full)
