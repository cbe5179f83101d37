"""Prompt lookup as a drafter: in a request's own text, and in answers of late.

A request that is repeated, or one of a series that are alike, is answered as others were. So what
was said remains for a while, for requests of the same group: those that may find each other's
prefixes in the cache.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

import numpy as np
import torch
from surestep_kernels.ngram import RecentTexts

from .base import Drafts

if TYPE_CHECKING:
    from surestep_common.invariants import Int32Array
    from surestep_kernels.ngram import Ngram
    from surestep_kernels.slot_state import SlotState

_GROUPS = 64  # whose answers are kept
_TOKENS = 1 << 14  # of each, and ends of prompts
_OF_PROMPT = 64  # tokens before an answer, by which its beginning is found
_LEAST_MATCH = 4  # tokens: fewer are common to answers that go on differently
_END = -1  # stands between two texts


class RecentAnswers:
    """Answers of late, by the group of their requests."""

    def __init__(self, num_slots: int) -> None:
        self._tokens = torch.zeros(_GROUPS, _TOKENS, dtype=torch.int32)
        self._lengths = torch.zeros(_GROUPS, dtype=torch.int32)
        self._lines = OrderedDict[int, int]()  # by group, the one that was used last at the end
        self._group = np.zeros(num_slots, dtype=np.uint64)

    def admit(self, slot: int, group: int) -> None:
        """Note the group of a request, 0 for one whose answer is not kept."""
        self._group[slot] = group

    def keep(self, slot: int, known: Int32Array, prompt_len: int) -> None:
        """Keep the answer in a request's `known` tokens."""
        group, text = int(self._group[slot]), known[max(prompt_len - _OF_PROMPT, 0) :]
        if not group or len(known) <= prompt_len:
            return
        line, text = self._line(group), text[-(_TOKENS // 2) :]
        tokens, length = self._tokens[line].numpy(), int(self._lengths[line])
        left = min(length, _TOKENS - len(text) - 1)
        tokens[:left] = tokens[length - left : length].copy()  # the oldest make room
        tokens[left : left + len(text)] = text
        tokens[left + len(text)] = _END
        self._lengths[line] = left + len(text) + 1

    def _line(self, group: int) -> int:
        """Return the line of a group, which may take that of the one not used for longest."""
        if group not in self._lines:
            full = len(self._lines) == _GROUPS
            line = self._lines.popitem(last=False)[1] if full else len(self._lines)
            self._lines[group] = line
            self._lengths[line] = 0
        self._lines.move_to_end(group)
        return self._lines[group]

    def of(self, slots: torch.Tensor, min_n: int) -> RecentTexts | None:
        """Return what rows in slots [R] may look into for `min_n` tokens; None for nothing."""
        lines = [self._lines.get(group, -1) for group in self._group[slots.numpy()].tolist()]
        if max(lines, default=-1) < 0:
            return None
        line = torch.tensor(lines, dtype=torch.int32)
        return RecentTexts(self._tokens, self._lengths, line, max(min_n, _LEAST_MATCH))

    def clear(self) -> None:
        """Forget all."""
        self._lines.clear()


class NgramDrafter:
    """Drafts what followed the most recent of the longest matches of `min_n` to `max_n` tokens.

    A request without a match gets no drafts, any other one as many as it may have.
    """

    def __init__(
        self,
        lookup: Ngram,
        *,
        num_drafts: int,
        max_n: int,
        min_n: int,
        recent: RecentAnswers | None = None,
    ) -> None:
        """`recent` are looked into, too, on devices whose results can be read freely."""
        assert 1 <= min_n <= max_n
        self._lookup, self._recent = lookup, recent
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
            recent=self._recent.of(slots, self._min_n) if self._recent is not None else None,
        )
        return Drafts(ids, counts)

    def look_up(self, state: SlotState, slots: torch.Tensor, room: torch.Tensor) -> Drafts:
        """Return what followed last time in slots [R], at most `room` [R]. All columns are i32.

        Rows for which nothing is found have no drafts."""
        drafts = self.propose(state.tokens, slots, state.known[slots], room)
        return drafts._replace(looked_up=drafts.counts)
