"""Between the core's messages and the protocol's; the one file that knows both."""

from __future__ import annotations

from collections.abc import Sequence

from surestep_common.invariants import LedgerError
from surestep_proto import engine_pb2 as pb

from .messages import Outcome, Plan
from .sequence import Logprobs, Tenancy


def to_proto(plan: Plan, budget_ms: int) -> pb.StepPlan:
    """The message that every rank gets."""
    message = pb.StepPlan(
        epoch=plan.epoch,
        step=plan.step,
        budget_ms=budget_ms,
        freed_slots=[freed.slot for freed in plan.freed],
        freed_slot_epochs=[freed.slot_epoch for freed in plan.freed],
        admissions=[_admission(tenancy) for tenancy in plan.admissions],
        extend_slots=[extend.slot for extend in plan.extends],
        extend_counts=[len(extend.blocks) for extend in plan.extends],
        block_ids=[block for extend in plan.extends for block in extend.blocks],
        slot=plan.slot,
        slot_epoch=plan.slot_epoch,
        num_tokens=plan.num_tokens,
        len_lo=plan.len_lo,
        len_hi=plan.len_hi,
        k_cap=plan.k_cap,
        accepted_step=plan.accepted_step,
        accepted=plan.accepted,
        depends_on_step=plan.depends_on_step,
    )
    message.mode.extend(plan.mode)  # type: ignore[arg-type]  # ints are enum values on the wire
    return message


def _admission(tenancy: Tenancy) -> pb.Admission:
    seq = tenancy.seq
    return pb.Admission(
        slot=tenancy.slot,
        slot_epoch=tenancy.slot_epoch,
        request_id=seq.request.id,
        token_ids=seq.tokens,
        prompt_len=seq.prompt_len,
        num_cached=tenancy.num_cached,
        max_len=tenancy.max_len,
        sampling=seq.request.sampling,
    )


def from_proto(results: Sequence[pb.StepResult]) -> Outcome:
    """One outcome from the results of all ranks for a step, in rank order. Raises LedgerError."""
    first, ok = results[0], pb.OK
    if any((r.epoch, r.step) != (first.epoch, first.step) for r in results):
        raise LedgerError(f"ranks answer different steps: {[(r.epoch, r.step) for r in results]}")
    return Outcome(
        epoch=first.epoch,
        step=first.step,
        digests=[result.digest for result in results],
        slot=list(first.slot),
        slot_epoch=list(first.slot_epoch),
        ok=[status == ok for status in first.status],
        len_before=list(first.len_before),
        n_drafts=list(first.n_drafts),
        n_accepted=list(first.n_accepted),
        n_emitted=list(first.n_emitted),
        token_ids=list(first.token_ids),
        logprobs=_by_row(first.logprobs),
        prompt_logprobs=_by_row(first.prompt_logprobs),
    )


def _by_row(columns: pb.LogprobColumns) -> dict[int, Logprobs]:
    rows: dict[int, Logprobs] = {}
    start = 0
    for index, row in enumerate(columns.row):
        end = start + columns.num_top[index]
        position = rows.setdefault(row, Logprobs())
        position.token_id.append(columns.token_id[index])
        position.logprob.append(columns.logprob[index])
        position.rank.append(columns.rank[index])
        position.num_top.append(end - start)
        position.top_token_ids.extend(columns.top_token_ids[start:end])
        position.top_logprobs.extend(columns.top_logprobs[start:end])
        start = end
    return rows


def logprob_columns(logprobs: Logprobs, first_row: int) -> pb.LogprobColumns:
    """Columns whose positions are numbered from `first_row`."""
    return pb.LogprobColumns(
        row=range(first_row, first_row + len(logprobs.token_id)),
        token_id=logprobs.token_id,
        logprob=logprobs.logprob,
        rank=logprobs.rank,
        num_top=logprobs.num_top,
        top_token_ids=logprobs.top_token_ids,
        top_logprobs=logprobs.top_logprobs,
    )
