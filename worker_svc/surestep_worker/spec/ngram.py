"""Prompt lookup: what followed the same words last time will follow them again.

After A. Saxena's prompt lookup decoding. The last n tokens are looked up in the request's own
tokens, prompt and output; the tokens behind the match are the drafts.
"""

from __future__ import annotations

import torch

from .base import Drafts


class NgramDrafter:
    """Drafts from the most recent of the longest matches of `min_n` to `max_n` tokens."""

    def __init__(self, *, num_drafts: int, max_n: int, min_n: int) -> None:
        assert 1 <= min_n <= max_n
        self._num_drafts = num_drafts
        self._max_n = max_n
        self._min_n = min_n

    def propose(
        self,
        tokens: torch.Tensor,
        slots: torch.Tensor,
        lengths: torch.Tensor,
        k_caps: torch.Tensor,
    ) -> Drafts:
        """See Drafter. A request without a match gets no drafts, any other one all it may have."""
        if slots.numel() == 0 or self._num_drafts == 0:
            return Drafts(slots.new_zeros(slots.numel(), self._num_drafts), torch.zeros_like(slots))
        end = self._best_match(tokens, slots, lengths).unsqueeze(1)
        last = lengths.unsqueeze(1) - 1
        # A match that overlaps its own continuation repeats: read on in what is being drafted.
        period = last - end
        ahead = torch.arange(self._num_drafts, device=tokens.device)
        found = tokens[slots.unsqueeze(1), end + 1 + ahead % period].long()
        counts = torch.where(end.squeeze(1) >= 0, k_caps.clamp(max=self._num_drafts), 0)
        return Drafts(torch.where(ahead < counts.unsqueeze(1), found, 0), counts)

    def _best_match(
        self, tokens: torch.Tensor, slots: torch.Tensor, lengths: torch.Tensor
    ) -> torch.Tensor:
        """Index of the last token of each row's best match i64[R], -1 without one."""
        last = lengths - 1
        window = tokens[slots, : int(lengths.max())]
        best = torch.full_like(last, -1)
        row, end = (window == window.gather(1, last.unsqueeze(1))).nonzero(as_tuple=True)
        survives = end < last[row]
        for n in range(1, self._max_n + 1):  # here row, end list the places where n - 1 tokens match
            if n > 1:
                survives = end >= n - 1
                earlier, newest = (end - n + 1).clamp(min=0), (last[row] - n + 1).clamp(min=0)
                survives &= window[row, earlier] == window[row, newest]
            row, end = row[survives], end[survives]
            if n >= self._min_n:
                longest = torch.full_like(best, -1).scatter_reduce_(0, row, end, "amax")
                best = torch.where(longest >= 0, longest, best)
        return best
