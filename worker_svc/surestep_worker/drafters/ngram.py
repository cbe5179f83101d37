"""Prompt lookup as a drafter."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from .base import Drafts

if TYPE_CHECKING:
    from surestep_kernels.ngram import Ngram
    from surestep_kernels.slot_state import SlotState


class NgramDrafter:
    """Drafts what followed the most recent of the longest matches of `min_n` to `max_n` tokens.

    A request without a match gets no drafts, any other one as many as it may have.
    """

    def __init__(self, lookup: Ngram, *, num_drafts: int, max_n: int, min_n: int) -> None:
        assert 1 <= min_n <= max_n
        self._lookup = lookup
        self._num_drafts = num_drafts
        self._max_n = max_n
        self._min_n = min_n

    def propose(
        self,
        tokens: torch.Tensor,
        slots: torch.Tensor,
        lengths: torch.Tensor,
        max_drafts: torch.Tensor,
    ) -> Drafts:
        num_drafts = self._num_drafts
        if slots.numel() == 0 or num_drafts == 0:
            return Drafts(slots.new_zeros(slots.numel(), num_drafts), torch.zeros_like(slots))
        ids, counts = self._lookup(
            tokens,
            slots,
            lengths,
            max_drafts,
            num_drafts=num_drafts,
            max_n=self._max_n,
            min_n=self._min_n,
        )
        return Drafts(ids, counts)

    def look_up(self, state: SlotState, slots: torch.Tensor, room: torch.Tensor) -> Drafts:
        """Return what followed last time in slots i64[R], at most `room` i64[R]; ids and counts are
        i32. Rows for which nothing is found have no drafts."""
        drafts = self.propose(state.tokens, slots, state.known[slots].long(), room)
        counts = drafts.counts.int()
        return Drafts(drafts.ids.int(), counts, looked_up=counts)
