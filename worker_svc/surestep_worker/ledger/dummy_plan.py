"""Plans made without a scheduler, before a rank serves one."""

from __future__ import annotations

from collections.abc import Sequence

from surestep_proto import sampling_pb2
from surestep_proto import worker_pb2 as pb


def add_admission(
    plan: pb.StepPlan,
    slot: int,
    ids: Sequence[int],
    blocks: Sequence[Sequence[int]],
    max_len: int,
    num_cached: int = 0,
) -> None:
    """Admit a greedy request to a slot, with its known token ids and its blocks by KV group."""
    plan.admissions.add(
        slot=slot,
        slot_epoch=1,
        token_ids=ids,
        prompt_len=len(ids),
        num_cached=num_cached,
        max_len=max_len,
        sampling=sampling_pb2.SamplingParams(top_p=1, repetition_penalty=1),
        drafter_len=max(num_cached - 1, 0),
    )
    for group, table in enumerate(blocks):
        plan.extend_slots.append(slot)
        plan.extend_groups.append(group)
        plan.extend_counts.append(len(table))
        plan.block_ids.extend(table)


def add_row(
    plan: pb.StepPlan,
    slot: int,
    mode: pb.DecodeMode,
    length: int,
    *,
    num_tokens: int = 0,
    lag: int = 0,
    max_drafts: int = 0,
    last_step: int = 0,
) -> None:
    """Add a row of a slot that holds `length` committed tokens; its drafter lags by `lag`."""
    plan.slot.append(slot)
    plan.slot_epoch.append(1)
    plan.mode.append(mode)
    plan.num_tokens.append(num_tokens)
    plan.len_lo.append(length)
    plan.len_hi.append(length)
    plan.max_drafts.append(max_drafts)
    plan.max_proposed.append(max_drafts)
    plan.accepted_step.append(0)
    plan.accepted.append(0)
    plan.depends_on_step.append(last_step)
    plan.catch_up.append(lag)
