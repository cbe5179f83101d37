"""The token ledger: every scheduled token of a tenancy ends accepted, rejected or discarded."""

from __future__ import annotations

import numpy as np
from surestep_common.invariants import IntArray, LedgerError


class Ledger:
    """Counts of tokens (positions of planned rows) by slot [num_slots], for its newest tenancy.

    Kept apart from the lengths they must match.
    """

    def __init__(self, num_slots: int) -> None:
        self.scheduled = np.zeros(num_slots, dtype=np.int64)
        self.accepted = np.zeros(num_slots, dtype=np.int64)
        self.rejected = np.zeros(num_slots, dtype=np.int64)
        self.discarded = np.zeros(num_slots, dtype=np.int64)

    def open(self, slot: int) -> None:
        for column in (self.scheduled, self.accepted, self.rejected, self.discarded):
            column[slot] = 0

    def schedule(self, slot: IntArray, width: IntArray) -> None:
        """Enter planned rows [R] of `width` tokens each."""
        self.scheduled[slot] += width

    def settle(self, slot: IntArray, width: IntArray, advance: IntArray) -> None:
        """Enter that rows [R] of `width` tokens each committed the first `advance` of them."""
        self.accepted[slot] += advance
        self.rejected[slot] += width - advance

    def check(self, slot: int, *, in_flight: int, committed: int) -> None:
        """Check invariant 6 for a tenancy that computed `committed` tokens. Raises LedgerError."""
        scheduled, accepted = int(self.scheduled[slot]), int(self.accepted[slot])
        rejected, discarded = int(self.rejected[slot]), int(self.discarded[slot])
        settled = accepted + rejected + discarded
        if scheduled != settled + in_flight or accepted != committed or in_flight < 0:
            raise LedgerError(
                f"slot {slot}: {scheduled} tokens scheduled, {accepted} accepted, {rejected} "
                f"rejected, {discarded} discarded with {in_flight} in flight, {committed} committed"
            )

    def close(self, slot: int, *, in_flight: int, committed: int) -> None:
        """End a tenancy; what is in flight will be discarded when its results arrive."""
        self.check(slot, in_flight=in_flight, committed=committed)
        self.discarded[slot] += in_flight
        self.check(slot, in_flight=0, committed=committed)
