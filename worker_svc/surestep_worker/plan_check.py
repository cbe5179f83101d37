"""The worker's side of the double entry: every row of a plan against what the slots know."""

from __future__ import annotations

from surestep_common.invariants import LedgerError, check_plan_row

from .plan import Rows
from .slots import Slots


def check_rows(rows: Rows, slots: Slots, max_draft_tokens: int) -> None:
    """Raises LedgerError when a row contradicts the slot it means."""
    columns = zip(
        rows.slot.tolist(),
        rows.slot_epoch.tolist(),
        rows.mode.tolist(),
        rows.num_tokens.tolist(),
        rows.len_lo.tolist(),
        rows.len_hi.tolist(),
        rows.k_cap.tolist(),
        rows.accepted.tolist(),
        rows.depends_on_step.tolist(),
        slots.accepted_at(rows.slot, rows.accepted_step).tolist(),
        strict=True,
    )
    for slot, tenancy, mode, num_tokens, lo, hi, k_cap, accepted, depends_on, logged in columns:
        if not slots.occupied[slot] or slots.tenancy[slot] != tenancy:
            raise LedgerError(f"slot {slot} does not hold tenancy {tenancy}")
        if k_cap > max_draft_tokens:
            raise LedgerError(f"k_cap {k_cap} exceeds {max_draft_tokens}")
        check_plan_row(
            mode=mode,
            num_tokens=num_tokens,
            len_lo=lo,
            len_hi=hi,
            k_cap=k_cap,
            accepted=accepted,
            depends_on_step=depends_on,
            length=int(slots.committed[slot]),
            capacity=int(slots.num_blocks[slot]) * slots.block_size,
            prefill_len=int(slots.admitted_len[slot]),
            max_len=int(slots.max_len[slot]),
            logged_accepted=None if logged < 0 else logged,
            last_step=int(slots.last_step[slot]),
        )
