"""The end of a step on its device: accept drafts that equal the choice, and advance the slots."""

from __future__ import annotations

from typing import Generic, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from surestep_kernels.choose import Chosen, RowStatus
from surestep_kernels.slot_state import DraftIds, SlotState, StepRows
from surestep_kernels.step_columns import Column


class StopIds(NamedTuple, Generic[Column]):
    """The stop ids of each window."""

    cu: Column  # i32[V+1] those of window w are ids[cu[w]:cu[w+1]]
    ids: Column  # i32[..]


class Report(NamedTuple, Generic[Column]):
    """Report of a step on each row, as columns; the K + 1 tokens follow them."""

    len_before: Column  # i32[R]
    n_drafts: Column
    status: Column  # RowStatus
    n_accepted: Column
    n_emitted: Column
    folded: Column  # tokens that the recurrent state holds afterwards
    drafter_len: Column
    tokens: Column  # i32[R, K+1] emitted ids, leading part

    @classmethod
    def of(cls, words: Tensor) -> Report:
        """Return views of words i32[R, report_width(K)]."""
        columns = len(cls._fields) - 1
        return Report._make((*words[:, :columns].unbind(dim=1), words[:, columns:]))


def report_width(num_drafts: int) -> int:
    """Return the number of words in a row's report."""
    return len(Report._fields) - 1 + num_drafts + 1


class CommitStep(Protocol):
    def __call__(
        self, rows: StepRows, drafts: DraftIds, chosen: Chosen, stops: StopIds, state: SlotState
    ) -> Tensor: ...


def commit_step_reference(
    rows: StepRows, drafts: DraftIds, chosen: Chosen, stops: StopIds, state: SlotState
) -> Tensor:
    """Decide what every window emits, advance every slot, and report i32[R, report_width(K)].

    A window ends at the first of: a choice that differs from its draft, a stop id, the position
    after the last draft, or a bad position (which is not emitted). A row whose first position is
    bad emits nothing and does not advance, and neither does a row of the NULL slot. Rows of known
    tokens advance by all of them.
    """
    slot = rows.slot.long()
    real = slot < len(state.tokens) - 1
    has, advances = (rows.window >= 0) & real, rows.advances * real
    window = rows.window.clamp(min=0).long()
    column = torch.arange(drafts.ids.shape[1] + 1, device=slot.device)
    inside = has.unsqueeze(1) & (column <= drafts.counts.unsqueeze(1))
    index = torch.where(inside, rows.cu_windows[window].long().unsqueeze(1) + column, 0)
    # Padded: a step of prompts alone has no window at all.
    tokens, status = (functional.pad(column, (0, 1))[index] for column in chosen)
    equal = functional.pad((tokens[:, :-1] == drafts.ids) & inside[:, 1:], (0, 1))
    stop = _stops(tokens, window, stops)
    emitted = inside & (status == RowStatus.OK)
    emitted[:, 1:] &= equal[:, :-1] & ~stop[:, :-1]
    n_emitted = emitted.int().cumprod(dim=1).sum(dim=1).int()
    last = (n_emitted - 1).clamp(min=0)
    drafted_stop = (equal & stop).gather(1, last.long().unsqueeze(1)).squeeze(1) & (n_emitted > 0)
    status = torch.where(has, status[:, 0], RowStatus.OK)
    start, known = state.committed[slot], state.known[slot]
    count = rows.cu_rows[1:] - rows.cu_rows[:-1]
    consumed = torch.where(advances > 0, count, n_emitted)
    place = known.long().unsqueeze(1) + column
    written = column < n_emitted.unsqueeze(1)
    state.tokens[slot.unsqueeze(1).expand_as(place)[written], place[written]] = tokens[written]
    state.committed[slot] = start + torch.where(status == RowStatus.OK, consumed, 0)
    state.known[slot] = known + n_emitted
    state.folded[slot] = folded = start + count * advances
    state.drafter_len[slot] = upto = torch.minimum(start, state.drafter_len[slot] + rows.catch_up)
    facts = (start, drafts.counts, status, last + drafted_stop, n_emitted, folded, upto)
    return torch.cat((torch.stack(facts, dim=1).int(), tokens), dim=1)


def _stops(tokens: Tensor, window: Tensor, stops: StopIds) -> Tensor:
    """Return which of tokens [R, K+1] end their request."""
    index = torch.arange(len(stops.ids), device=tokens.device)
    begin, end = stops.cu[window], functional.pad(stops.cu, (0, 1))[window + 1]
    mine = (begin.unsqueeze(1) <= index) & (index < end.unsqueeze(1))
    return ((tokens.unsqueeze(2) == stops.ids) & mine.unsqueeze(1)).any(dim=2)
