"""The token ledger of one tenancy: every scheduled token ends accepted, rejected or discarded."""

from __future__ import annotations

from dataclasses import dataclass

from surestep_common.invariants import LedgerError


@dataclass(slots=True)
class Ledger:
    """Counts of tokens (positions of planned rows), kept apart from the lengths they must match."""

    scheduled: int = 0
    accepted: int = 0
    rejected: int = 0
    discarded: int = 0

    def settle(self, width: int, advance: int) -> None:
        """A row of `width` scheduled tokens committed the first `advance` of them."""
        self.accepted += advance
        self.rejected += width - advance

    def check(self, *, in_flight: int, committed: int) -> None:
        """Invariant 6 for a tenancy that computed `committed` tokens and waits for `in_flight`."""
        settled = self.accepted + self.rejected + self.discarded
        if self.scheduled != settled + in_flight or self.accepted != committed or in_flight < 0:
            raise LedgerError(f"{self} with {in_flight} tokens in flight, {committed} committed")

    def close(self, *, in_flight: int, committed: int) -> None:
        """The tenancy ends; what is in flight will be discarded when its results arrive."""
        self.check(in_flight=in_flight, committed=committed)
        self.discarded += in_flight
        self.check(in_flight=0, committed=committed)
