"""The drafter as a fault domain of its own: when it fails, the step goes on without it.

A fault costs the drafts of its step, and those of plans that were made before the scheduler had
heard of it: such plans carry a smaller count of faults than the worker's own. The drafter's state
stays where it was, so that it can be caught up with when drafting is tried again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import NamedTuple, TypeVar

import torch
from surestep_common.errors import DrafterFault, InvalidRequest
from surestep_common.invariants import LedgerError
from surestep_kernels.step.slot_state import DraftIds, SlotState
from surestep_kernels.step.step_ops import StepOps
from torch import Tensor

from surestep_worker.drafters import DeviceDrafter, Drafter, Drafts, KeepsState, StatefulDrafter
from surestep_worker.drafters.base import DraftSteps
from surestep_worker.drafters.inputs import DraftInputs, DraftShape
from surestep_worker.ledger.plan import IntArray, Rows

from .proposals import Proposals, check_drafts
from .rank_context import RankContext

T = TypeVar("T")

logger = logging.getLogger(__name__)


class Drafted(NamedTuple):
    """Drafts of all rows of a step."""

    drafts: DraftIds  # [R]
    catch_up: Tensor  # i32[R] positions that the drafter's state follows by, at most
    non_finite: Tensor  # i32[R] 1: drafting met logits that were not finite
    failed: bool
    error: Tensor  # i32[1], see slot_state

    def spread(self, rows: Tensor, num_rows: int) -> Drafted:
        """The same among R rows, of which only those at `rows` i64[..] had to do with drafts."""
        if len(rows) == num_rows:
            return self

        def all_of(part: Tensor) -> Tensor:
            return part.new_zeros(num_rows, *part.shape[1:]).index_copy_(0, rows, part)

        drafts = DraftIds(*map(all_of, self.drafts))
        catch_up, non_finite = all_of(self.catch_up), all_of(self.non_finite)
        return Drafted(drafts, catch_up, non_finite, self.failed, self.error)


class Drafting:
    """Runs the drafter. Not thread-safe: every call comes from the step thread."""

    def __init__(self, context: RankContext, ops: StepOps, state: SlotState) -> None:
        """Raises InvalidRequest for a drafter whose state cannot live on a device."""
        drafter = context.drafter
        self._drafter, self._state = drafter, state
        self._tp, self._device, self._synchronous = context.tp, context.device, context.synchronous
        self._max_drafts, self._vocab_size = (
            context.max_draft_tokens,
            context.model.config.vocab_size,
        )
        self.head: DraftSteps | None = None
        self._proposals: Proposals | None = None
        self._unread: Drafter | None = None  # whose proposals nobody looks at but the device
        if isinstance(drafter, DeviceDrafter):
            self.head = drafter.on_device(ops, state)
        elif drafter is not None and context.synchronous:
            self._proposals = Proposals(drafter, context, state)
        elif isinstance(drafter, StatefulDrafter):
            raise InvalidRequest("this drafter runs on the CPU only", param="speculative_config")
        else:
            self._unread = drafter
        self.has_state = isinstance(drafter, KeepsState)  # it follows what is committed
        self.faults = 0  # of this epoch

    def skips(self, known_faults: int) -> bool:
        """Whether a plan that knows of so many faults was made too early to draft.

        Raises LedgerError for a plan that knows of faults that never were.
        """
        if known_faults > self.faults:
            raise LedgerError(f"plan knows {known_faults} drafter faults, there were {self.faults}")
        return known_faults < self.faults

    def run(self, sent: DraftInputs, shape: DraftShape) -> Drafted:
        """Draft for every row."""
        drafted = self._attempt(lambda: self._draft(sent, shape))
        return drafted or self.nothing(len(sent.slot), failed=True)

    def nothing(self, num_rows: int, *, failed: bool = False) -> Drafted:
        """No row has drafts."""
        words = partial(torch.zeros, dtype=torch.int32, device=self._device)
        drafts = DraftIds(words(num_rows, self._max_drafts), words(num_rows))
        return Drafted(drafts, drafts.counts, drafts.counts, failed, words(1))

    def _draft(self, sent: DraftInputs, shape: DraftShape) -> Drafted:
        drafts_unread = self._unread is not None and shape.num_drafts > 0
        if self.head is None and self._proposals is None and not drafts_unread:
            return self.nothing(len(sent.slot))
        zeros = torch.zeros_like(sent.max_drafts)
        catch_up, error = sent.catch_up if self.has_state else zeros, zeros.new_zeros(1)
        if self.head is not None:
            assert sent.head is not None
            drafts = self.head.draft(sent, sent.head, shape, error)
            if self._synchronous:
                check_drafts(drafts, sent.max_drafts, self._vocab_size)
        elif self._proposals is not None:
            drafts = self._proposals(sent.slot, sent.max_drafts, sent.catch_up)
        else:
            assert self._unread is not None
            drafts = self._propose(self._unread, sent.slot, sent.max_drafts)
        non_finite = zeros if drafts.non_finite is None else drafts.non_finite
        proposed = DraftIds(drafts.ids, drafts.counts)
        return Drafted(proposed, catch_up, non_finite, failed=False, error=error)

    def observe(self, rows: Rows, n_drafts: IntArray, n_accepted: IntArray) -> None:
        """A drafter with state learns how its drafts for rows [R] fared."""
        drafter, drafted = self._drafter, n_drafts > 0
        if isinstance(drafter, KeepsState) and drafted.any():
            columns = rows.slot[drafted], n_drafts[drafted], n_accepted[drafted]
            self._attempt(lambda: drafter.observe(*columns))

    def _attempt(self, work: Callable[[], T]) -> T | None:
        """What work returns. An exception is counted, unless other ranks may not share it."""
        try:
            return work()
        except Exception as error:
            if self.has_state and self._tp.size > 1:
                raise DrafterFault(f"the drafter failed: {error!r}") from error
            logger.exception("the drafter failed, the step goes on without it")
            self.faults += 1
            return None

    def _propose(self, drafter: Drafter, slot: Tensor, max_drafts: Tensor) -> Drafts:
        """Of a drafter without state; rows that may have no drafts get none."""
        state, line, caps = self._state, slot.long(), max_drafts.long()
        ids, counts, _ = drafter.propose(state.tokens, line, state.known[line].long(), caps)
        real = (ids >= 0) & (ids < self._vocab_size)  # drafts end where they make no sense
        counts = torch.minimum(torch.minimum(counts, caps), real.int().cumprod(dim=1).sum(dim=1))
        return Drafts(torch.where(real, ids, 0).int(), counts.int())
