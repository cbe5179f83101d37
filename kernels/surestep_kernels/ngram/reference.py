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


class RecentTexts(NamedTuple):
    """Other texts that G lines hold, one behind the other with -1 between them."""

    tokens: Tensor  # i32[G, V]
    lengths: Tensor  # i32[G] tokens of each line
    line: Tensor  # i32[R] that each row may look into, -1 = none
    min_n: int  # shortest match there


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
        recent: RecentTexts | None = None,
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
    recent: RecentTexts | None = None,
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
        recent: texts in which a longer match counts before those of the row itself; its drafts end
            with the text. Only where launches complete before they return.
    """
    dtype, slots, lengths = slots.dtype, slots.long(), lengths.long()
    end = _best_match(tokens, slots, lengths, max_n, min_n).unsqueeze(1)
    period = (lengths.unsqueeze(1) - 1 - end).clamp(min=1)
    ahead = torch.arange(num_drafts, device=tokens.device)
    found = tokens[slots.unsqueeze(1), end + 1 + ahead % period]
    counts = torch.where(end.squeeze(1) >= 0, max_drafts.clamp(max=num_drafts), 0)
    ids = torch.where(ahead < counts.unsqueeze(1), found, 0)
    if recent is not None:
        for row in recent.line.ge(0).nonzero()[:, 0].tolist():
            own = tokens[slots[row], : lengths[row]].tolist()
            least = max(_overlap(own, own[: int(end[row]) + 1], max_n) + 1, recent.min_n)
            line = int(recent.line[row])
            text = recent.tokens[line, : recent.lengths[line]].tolist()
            drafts = _behind(text, own, range(max_n, least - 1, -1))
            if drafts and max_drafts[row] > 0:
                drafts = drafts[: min(int(max_drafts[row]), num_drafts)]
                counts[row] = len(drafts)
                ids[row] = torch.tensor(drafts + [0] * (num_drafts - len(drafts)))
    return NgramDrafts(ids.to(dtype), counts.to(dtype))


def _overlap(a: list[int], b: list[int], most: int) -> int:
    """Return how many tokens at the end of two texts are equal."""
    pairs = zip(a[::-1][:most], b[::-1], strict=False)
    return next((n for n, (x, y) in enumerate(pairs) if x != y), min(len(a), len(b), most))


def _behind(text: list[int], own: list[int], lengths: range) -> list[int]:
    """Return what follows the last of the longest matches of `own`'s end, to its text's end."""
    for n in lengths:
        for end in range(len(text) - 1, n - 1, -1):
            if n <= len(own) and text[end] >= 0 and text[end - n : end] == own[-n:]:
                stop = next((at for at in range(end, len(text)) if text[at] < 0), len(text))
                return text[end:stop]
    return []


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
