"""The worker's side of the double entry: every row of a plan against what the slots know."""

from __future__ import annotations

from surestep_common.invariants import require
from surestep_common.plan_rows import KnownSlots, check_plan_rows
from surestep_proto import sampling_pb2 as pb

from .plan import Rows
from .slots import Slots


def check_rows(rows: Rows, slots: Slots, *, most_drafts: int, most_proposed: int) -> None:
    """Raise LedgerError when a row contradicts its slot."""
    slot = rows.slot
    held = slots.occupied[slot] & (slots.tenancy[slot] == rows.slot_epoch)
    require(held, slot, "it does not hold tenancy {}", rows.slot_epoch)
    message = f"max_drafts {{}} exceeds {most_drafts}"
    require(rows.max_drafts <= most_drafts, slot, message, rows.max_drafts)
    message = f"max_proposed {{}} exceeds {most_proposed}"
    require(rows.max_proposed <= most_proposed, slot, message, rows.max_proposed)
    known = KnownSlots(
        length=slots.committed[slot],
        capacity=slots.capacity(slot),
        prefill_len=slots.admitted_len[slot],
        max_len=slots.max_len[slot],
        prompt_len=slots.prompt_len[slot],
        pools=slots.pooling[slot] != pb.NO_POOLING,
        logged_accepted=slots.accepted_at(slot, rows.accepted_step),
        last_step=slots.last_step[slot],
        prompt_chunk=slots.prompt_chunk,
    )
    check_plan_rows(rows, known)


def check_caught_up(rows: Rows, slots: Slots) -> None:
    """Raise LedgerError when a row would draft from a drafter's state that lags behind."""
    slot = rows.slot
    upto, length = slots.drafter_len[slot], slots.committed[slot]
    ready = (rows.max_proposed == 0) | (upto == length)
    require(ready, slot, "the drafter is at {} of {} tokens and is to draft", upto, length)
