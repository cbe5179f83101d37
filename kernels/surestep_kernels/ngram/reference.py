"""Prompt lookup: what followed the same tokens last time is likely to follow them again.

After A. Saxena's prompt lookup decoding. The last n tokens are looked up in the request's own
prompt and output; the tokens after the match are the drafts.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor


class NgramDrafts(NamedTuple):
    """Drafts of R rows, in the integer type of `slots`."""

    ids: Tensor  # [R, num_drafts] 0 where there is none
    counts: Tensor  # [R]


class Ngram(Protocol):
    def __call__(
        self,
        tokens: Tensor,
        slots: Tensor,
        lengths: Tensor,
        max_drafts: Tensor,
        *,
        num_drafts: int,
        max_n: int,
        min_n: int,
    ) -> NgramDrafts: ...


def ngram_reference(
    tokens: Tensor,
    slots: Tensor,
    lengths: Tensor,
    max_drafts: Tensor,
    *,
    num_drafts: int,
    max_n: int,
    min_n: int,
) -> NgramDrafts:
    """Draft the tokens after the most recent of the longest matches of min_n to max_n tokens.

    A row without a match gets no drafts, any other row as many as it may have. A match that
    overlaps its own continuation repeats: reading continues in the drafts themselves.

    Args:
        tokens: i32[S, W] token table.
        slots: [R] lines of the table, i32 or i64 as the next two.
        lengths: [R] known tokens: tokens[slot, :length]; what follows them is stale.
        max_drafts: [R] most drafts of each row, besides num_drafts.
        num_drafts: most drafts of any row, at least 1.
        max_n: longest match that counts as longer, at least min_n.
        min_n: shortest match, at least 1.
    """
    dtype, slots, lengths = slots.dtype, slots.long(), lengths.long()
    end = _best_match(tokens, slots, lengths, max_n, min_n).unsqueeze(1)
    period = (lengths.unsqueeze(1) - 1 - end).clamp(min=1)
    ahead = torch.arange(num_drafts, device=tokens.device)
    found = tokens[slots.unsqueeze(1), end + 1 + ahead % period]
    counts = torch.where(end.squeeze(1) >= 0, max_drafts.clamp(max=num_drafts), 0)
    ids = torch.where(ahead < counts.unsqueeze(1), found, 0)
    return NgramDrafts(ids.to(dtype), counts.to(dtype))


def _best_match(
    tokens: Tensor, slots: Tensor, lengths: Tensor, max_n: int, min_n: int
) -> torch.Tensor:
    """Return the index of the last token of each row's best match i64[R], -1 without one."""
    window = tokens[:, : max(int(lengths.max()), min_n)].index_select(0, slots)
    last = lengths - 1
    row, end = _shortest_matches(window, last, min_n)
    best = _latest(row, end, torch.full_like(last, -1))
    for n in range(min_n + 1, max_n + 1):
        if row.numel() == 0:
            break
        earlier, newest = end - n + 1, (last[row] - n + 1).clamp(min=0)
        longer = (earlier >= 0) & (window[row, earlier.clamp(min=0)] == window[row, newest])
        row, end = row[longer], end[longer]
        best = _latest(row, end, best)
    return best


def _shortest_matches(window: Tensor, last: Tensor, min_n: int) -> tuple[Tensor, Tensor]:
    """Return rows and last indices of all earlier places that match min_n tokens.

    This is the only pass over whole rows; few places are left after it.
    """
    span = window.shape[1] - min_n + 1
    match = torch.ones(window.shape[0], span, dtype=torch.bool, device=window.device)
    for offset in range(min_n):
        newest = (last - min_n + 1 + offset).clamp(min=0).unsqueeze(1)
        match &= window[:, offset : offset + span] == window.gather(1, newest)
    row, start = match.nonzero(as_tuple=True)
    end = start + min_n - 1
    earlier = end < last[row]
    return row[earlier], end[earlier]


def _latest(row: Tensor, end: Tensor, fallback: Tensor) -> Tensor:
    """Return the greatest `end` of every row i64[R], `fallback` for rows without any."""
    found = torch.full_like(fallback, -1).scatter_reduce_(0, row, end, "amax")
    return torch.where(found >= 0, found, fallback)
