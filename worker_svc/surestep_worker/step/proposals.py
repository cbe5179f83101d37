"""Runs drafters that know nothing of devices, where reading their proposals is free."""

from __future__ import annotations

from enum import IntEnum

import torch
from surestep_common.errors import InternalError
from surestep_kernels.slot_state import SlotState
from torch import Tensor

from surestep_worker.drafters import Drafter, Drafts, StatefulDrafter

from .rank_context import RankContext


class _Mark(IntEnum):
    """What rank 0 reports to the others of a row, beside its drafts."""

    FINE = 0
    NON_FINITE = 1
    FAILED = 2


class Proposals:
    """Checks what rank 0 proposes, and broadcasts it: all ranks verify the same drafts."""

    def __init__(self, drafter: Drafter, context: RankContext, state: SlotState) -> None:
        self._drafter, self._state, self._tp = drafter, state, context.tp
        self._stateful = drafter if isinstance(drafter, StatefulDrafter) else None
        self._max_drafts, self._vocab_size = (
            context.max_draft_tokens,
            context.model.config.vocab_size,
        )

    def __call__(self, slot: Tensor, max_drafts: Tensor, catch_up: Tensor) -> Drafts:
        """Return at most max_drafts drafts for each row [R]. All columns are i32.

        Raises, on all ranks, when the drafter of rank 0 raises or its proposals are invalid.
        """
        self._catch_up(slot.long(), catch_up)
        packed = torch.zeros(len(slot), self._max_drafts + 2, dtype=torch.int64)
        failure = self._propose(slot.long(), max_drafts.long(), packed)
        packed = self._tp.broadcast(packed)
        if (packed[:, -1] == _Mark.FAILED).any():
            raise failure or InternalError("the drafter of rank 0 failed")
        ids, counts, marks = packed[:, :-2].int(), packed[:, -2].int(), packed[:, -1]
        return Drafts(ids, counts, (marks == _Mark.NON_FINITE).int())

    def _catch_up(self, slot: Tensor, count: Tensor) -> None:
        if self._stateful is None:
            return
        lags = count > 0
        if lags.any():
            start = self._state.drafter_len[slot[lags]]
            columns = (column.long().numpy() for column in (slot[lags], start, count[lags]))
            self._stateful.catch_up(*columns)

    def _propose(self, slot: Tensor, max_drafts: Tensor, packed: Tensor) -> Exception | None:
        """Fill in ids, count and mark of each row. Return the exception of a failed drafter."""
        if self._tp.rank and self._stateful is None:
            return None
        try:
            drafting = max_drafts > 0
            if drafting.any():
                drafts = self._checked(slot[drafting], max_drafts[drafting])
                packed[drafting, :-2], packed[drafting, -2] = drafts.ids, drafts.counts
                if drafts.non_finite is not None:
                    packed[drafting, -1] = drafts.non_finite * _Mark.NON_FINITE
        except Exception as error:  # noqa: BLE001  # raised again when the other ranks know
            packed[:, -1] = _Mark.FAILED
            return error
        return None

    def _checked(self, slot: Tensor, max_drafts: Tensor) -> Drafts:
        tokens, known = self._state.tokens, self._state.known[slot].long()
        proposed = self._drafter.propose(tokens, slot, known, max_drafts)
        check_drafts(proposed, max_drafts, self._vocab_size)
        return proposed


def check_drafts(drafts: Drafts, max_drafts: Tensor, vocab_size: int) -> None:
    """Raise InternalError for drafts of rows [R] beyond max_drafts or the vocabulary."""
    if bool((drafts.counts > max_drafts).any()):
        raise InternalError("the drafter proposed more than it may")
    if not bool(((drafts.ids >= 0) & (drafts.ids < vocab_size)).all()):
        raise InternalError("the drafter proposed an id outside the vocabulary")
