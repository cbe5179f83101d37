"""Translates between the core's messages and the protocol's; the one file that knows both."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import numpy as np
from surestep_common.invariants import (
    BoolArray,
    IntArray,
    LedgerError,
    PlanRows,
    ResultRows,
    as_bits,
    of_bits,
)
from surestep_proto import sampling_pb2
from surestep_proto import worker_pb2 as pb

from surestep_scheduler.cache.tiers import Action, Answer, Order
from surestep_scheduler.core.messages import Kept, Outcome, Plan, RankTimes
from surestep_scheduler.core.sequence import Tenancy, TokenLogprobs

_COLUMNS = PlanRows.names()
_LEFT_OUT = ("adapter",)  # where all are 0


def to_proto(plan: Plan, budget_ms: int) -> pb.StepPlan:
    """Return the message that every rank gets."""
    message = pb.StepPlan(
        epoch=plan.epoch,
        step=plan.step,
        budget_ms=budget_ms,
        freed_slots=[freed.slot for freed in plan.freed],
        freed_slot_epochs=[freed.slot_epoch for freed in plan.freed],
        extend_slots=[extend.slot for extend in plan.extends],
        extend_counts=[len(extend.blocks) for extend in plan.extends],
        extend_groups=_groups(plan),
        release_slots=[given.slot for given in plan.give_backs],
        release_groups=[given.group for given in plan.give_backs],
        release_counts=[given.num_blocks for given in plan.give_backs],
        block_ids=[block for extend in plan.extends for block in extend.blocks],
        snapshot_slots=plan.rows.slot[plan.snapshot_requests.row].tolist(),
        snapshot_lens=plan.snapshot_requests.length.tolist(),
        snapshot_ids=plan.snapshot_requests.id.tolist(),
        drafter_faults=plan.drafter_faults,
        capture=plan.capture,
    )
    if plan.step == 1:
        message.planner = plan.planner
        if plan.kept is not None:
            message.kept.CopyFrom(_kept(plan.kept, plan.planner))
    for name in _COLUMNS:  # modes are enum values on the wire as they are
        column = getattr(plan.rows, name)
        if name not in _LEFT_OUT or column.any():
            getattr(message, name).extend(column.tolist())
    for tenancy in plan.admissions:
        _admit(message.admissions.add(), tenancy)
    return message


def _kept(kept: Kept, planner: int) -> pb.KeptCaches:
    snapshots = sorted(kept.snapshots.items())
    return pb.KeptCaches(
        planner=planner,
        epoch=kept.epoch,
        blocks=as_bits(kept.blocks),
        drafted=as_bits(kept.drafted),
        snapshot_ids=[snapshot for snapshot, _ in snapshots],
        snapshot_lens=[length for _, length in snapshots],
    )


def kept_by(infos: Sequence[pb.WorkerInfo], planner: int, epoch: int) -> Kept | None:
    """Return what all ranks have kept of one epoch of this planner, at most `epoch`.

    None if a rank has nothing, or something else.
    """
    first, told = infos[0].kept, [info.kept for info in infos]
    if first.planner != planner or not 0 < first.epoch <= epoch:
        return None
    if any((kept.planner, kept.epoch) != (planner, first.epoch) for kept in told):
        return None
    columns = [(kept.blocks, kept.drafted) for kept in told]
    num_blocks = infos[0].num_blocks
    if any(len(bits) != -(-num_blocks // 8) for pair in columns for bits in pair):
        return None
    blocks, drafted = (
        np.logical_and.reduce([of_bits(bits, num_blocks) for bits in ranks])
        for ranks in zip(*columns, strict=True)
    )
    snapshots = [dict(zip(kept.snapshot_ids, kept.snapshot_lens, strict=False)) for kept in told]
    common = dict(set.intersection(*(set(each.items()) for each in snapshots)))
    return Kept(first.epoch, blocks, drafted, common)


def _groups(plan: Plan) -> list[int]:
    """Return the KV groups of the plan's extends; none where all are of the first."""
    groups = [extend.group for extend in plan.extends]
    return groups if any(groups) else []


def _admit(message: pb.Admission, tenancy: Tenancy) -> None:
    """Fill an admission in its place: prompts may be long, and are not copied once more."""
    seq, known = tenancy.seq, tenancy.seq.request.wire_ids
    message.slot = tenancy.slot
    message.slot_epoch = tenancy.slot_epoch
    message.request_id = seq.request.id
    message.token_ids.extend(known)
    message.token_ids.extend(seq.tokens[len(known) :])
    message.prompt_len = seq.prompt_len
    message.num_cached = tenancy.num_cached
    message.max_len = seq.max_len
    message.snapshot_id = tenancy.snapshot_id
    message.drafter_len = tenancy.drafter_len
    message.text_group = tenancy.text_group
    if seq.request.adapter is not None:
        message.adapter = tenancy.adapter
        message.adapter_digest = seq.request.adapter.digest
    message.pooling = cast("sampling_pb2.Pooling", seq.request.pooling)
    message.label_ids.extend(seq.request.label_ids)
    if seq.request.sampling is not None:
        message.sampling.CopyFrom(seq.request.sampling)


def from_proto(results: Sequence[pb.StepResult]) -> Outcome:
    """Return one outcome of all ranks' results for a step, in rank order. Raises LedgerError."""
    first = results[0]
    if any((r.epoch, r.step) != (first.epoch, first.step) for r in results):
        raise LedgerError(f"ranks answer different steps: {[(r.epoch, r.step) for r in results]}")
    status = _column(first.status)
    return Outcome(
        epoch=first.epoch,
        step=first.step,
        digests=[result.digest for result in results],
        times=[_times(result.timings) for result in results],
        slot=_column(first.slot),
        slot_epoch=_column(first.slot_epoch),
        rows=ResultRows(
            ok=status == pb.OK,
            non_finite=status == pb.NON_FINITE,
            len_before=_column(first.len_before),
            n_drafts=_column(first.n_drafts),
            n_accepted=_column(first.n_accepted),
            n_emitted=_column(first.n_emitted),
            drafter_len=_column(first.drafter_len or _zeros(len(first.slot))),
            n_forced=_column(first.n_forced or _zeros(len(first.slot))),
            n_looked_up=_column(first.n_looked_up or _zeros(len(first.slot))),
        ),
        token_ids=np.array(first.token_ids[:], dtype=np.uint32),
        snapshot_ids_taken=_column(first.snapshot_ids_taken),
        drafter_faults=first.drafter_faults,
        missed_kind=first.missed_kind,
        drafter_skipped=first.drafter_skipped,
        draft_non_finite_rows=list(first.draft_non_finite_rows),
        logprobs=_by_row(first.logprobs),
        prompt_logprobs=_by_row(first.prompt_logprobs),
        pooled=_pooled(first),
        grammar_faults=_grammar_faults(first),
    )


def _times(timings: pb.Timings) -> RankTimes:
    return RankTimes(
        timings.queue_us,
        timings.prepare_us,
        timings.draft_us,
        timings.forward_us,
        timings.sample_us,
        timings.gap_us,
    )


def _pooled(result: pb.StepResult) -> dict[int, bytes]:
    if len(result.pooled_rows) != len(result.pooled):
        raise LedgerError(f"{len(result.pooled)} vectors of {len(result.pooled_rows)} rows")
    return dict(zip(result.pooled_rows, result.pooled, strict=True))


def _grammar_faults(result: pb.StepResult) -> dict[int, str]:
    if len(result.grammar_fault_rows) != len(result.grammar_faults):
        raise LedgerError(f"{len(result.grammar_faults)} faults of grammars are not parallel")
    return dict(zip(result.grammar_fault_rows, result.grammar_faults, strict=True))


def _column(values: Sequence[int] | IntArray) -> IntArray:
    # A field of a message takes six times as long as the list of its values.
    return np.array(values[:], dtype=np.int64)


def _zeros(count: int) -> IntArray:
    return np.zeros(count, dtype=np.int64)


def _by_row(columns: sampling_pb2.LogprobColumns) -> dict[int, TokenLogprobs]:
    rows: dict[int, TokenLogprobs] = {}
    start = 0
    for index, row in enumerate(columns.row):
        end = start + columns.num_top[index]
        position = rows.setdefault(row, TokenLogprobs())
        position.token_id.append(columns.token_id[index])
        position.logprob.append(columns.logprob[index])
        position.rank.append(columns.rank[index])
        position.num_top.append(end - start)
        position.top_token_ids.extend(columns.top_token_ids[start:end])
        position.top_logprobs.extend(columns.top_logprobs[start:end])
        start = end
    return rows


def logprob_columns(logprobs: TokenLogprobs, first_row: int) -> sampling_pb2.LogprobColumns:
    """Return columns whose positions are numbered from `first_row`."""
    return sampling_pb2.LogprobColumns(
        row=range(first_row, first_row + len(logprobs.token_id)),
        token_id=logprobs.token_id,
        logprob=logprobs.logprob,
        rank=logprobs.rank,
        num_top=logprobs.num_top,
        top_token_ids=logprobs.top_token_ids,
        top_logprobs=logprobs.top_logprobs,
    )


def tier_order(order: Order, epoch: int, block_size: int) -> pb.TierOrder:
    """Return the message that every rank gets."""
    drafted = np.array([line.drafted for line in order.blocks], dtype=np.bool_)
    return pb.TierOrder(
        epoch=epoch,
        number=order.number,
        action=order.action.name,
        timeout_ms=round(1000 * order.timeout_s),
        keys=[line.key for line in order.blocks],
        groups=[line.group for line in order.blocks],
        blocks=[line.id for line in order.blocks if line.id],
        drafted=as_bits(drafted) if order.action is Action.STORE else b"",
        snapshot_keys=[line.key for line in order.snapshots],
        snapshot_lens=[line.num_blocks * block_size for line in order.snapshots],
        snapshot_ids=[line.id for line in order.snapshots if line.id],
    )


def tier_answer(order: Order, answers: Sequence[pb.TierAnswer]) -> Answer:
    """Return what all ranks have done of an order. Raises LedgerError."""
    blocks, snapshots = len(order.blocks), len(order.snapshots)
    whole = _common([answer.blocks for answer in answers], blocks)
    drafted = _common([answer.drafted or bytes(-(-blocks // 8)) for answer in answers], blocks)
    taken = _common([answer.snapshots for answer in answers], snapshots)
    return Answer(order.number, whole, whole & drafted, taken)


def _common(told: Sequence[bytes], count: int) -> BoolArray:
    if any(len(bits) != -(-count // 8) for bits in told):
        raise LedgerError(f"a rank does not answer for {count} keys of the tiers")
    mask: BoolArray = np.logical_and.reduce([of_bits(bits, count) for bits in told])
    return mask
