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
        window = tokens[:, : max(int(lengths.max()), self._min_n)].index_select(0, slots)
        last = lengths - 1
        row, end = self._shortest_matches(window, last)
        best = _latest(row, end, torch.full_like(last, -1))
        for n in range(self._min_n + 1, self._max_n + 1):
            if row.numel() == 0:
                break
            earlier, newest = end - n + 1, (last[row] - n + 1).clamp(min=0)
            longer = (earlier >= 0) & (window[row, earlier.clamp(min=0)] == window[row, newest])
            row, end = row[longer], end[longer]
            best = _latest(row, end, best)
        return best

    def _shortest_matches(
        self, window: torch.Tensor, last: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows and last indices of all earlier places that match `min_n` tokens.

        The one pass over whole rows; what it leaves is few.
        """
        span = window.shape[1] - self._min_n + 1
        match = torch.ones(window.shape[0], span, dtype=torch.bool, device=window.device)
        for offset in range(self._min_n):
            newest = (last - self._min_n + 1 + offset).clamp(min=0).unsqueeze(1)
            match &= window[:, offset : offset + span] == window.gather(1, newest)
        row, start = match.nonzero(as_tuple=True)
        end = start + self._min_n - 1
        earlier = end < last[row]
        return row[earlier], end[earlier]


def _latest(row: torch.Tensor, end: torch.Tensor, fallback: torch.Tensor) -> torch.Tensor:
    """The greatest `end` of every row i64[R], `fallback` for rows without any."""
    found = torch.full_like(fallback, -1).scatter_reduce_(0, row, end, "amax")
    return torch.where(found >= 0, found, fallback)
