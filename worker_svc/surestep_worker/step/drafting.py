"""The drafter as a fault domain of its own: when it fails, the step goes on without it.

A fault costs the drafts of its step, and those of the plans that the scheduler made before it knew
of the fault: they carry a smaller count of faults than the worker's own. The drafter's state stays
as it was, so that it can catch up when drafting is tried again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from enum import IntEnum
from functools import partial
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from surestep_common.errors import DrafterFault, InternalError
from surestep_common.invariants import IntArray, LedgerError
from surestep_kernels.choose import DrawParams
from surestep_kernels.slot_state import DraftIds, SlotState
from surestep_kernels.step_columns import HostColumn
from surestep_kernels.table import StepOps
from torch import Tensor
from torch.nn import functional

from surestep_worker.distributed.tensor_parallel import TensorParallel
from surestep_worker.drafters import DeviceDrafter, Drafter, Drafts
from surestep_worker.drafters.base import DraftSteps
from surestep_worker.drafters.inputs import DraftInputs, DraftShape, HeadInputs
from surestep_worker.drafters.ngram import NgramDrafter

from .plan import Rows

T = TypeVar("T")
Propose = Callable[[DraftInputs, DraftShape, Tensor], Drafts]  # given the step's error word
Find = Callable[[Tensor, Tensor], Drafts]  # given slots i32[R] and room i32[R]

logger = logging.getLogger(__name__)


class Drafted(NamedTuple):
    """Drafts of all rows of a step."""

    drafts: DraftIds  # [R]
    catch_up: Tensor  # i32[R] most positions that the drafter's state has to catch up with
    non_finite: Tensor  # i32[R] 1: drafting met non-finite logits
    failed: bool
    error: Tensor  # i32[1] error word of slot_state
    looked_up: Tensor  # i32[R] of the drafts

    def spread(self, rows: Tensor, num_rows: int) -> Drafted:
        """Return these drafts as those of `rows` i64[..] among R rows; the others have none."""
        if len(rows) == num_rows:
            return self

        def scattered(part: Tensor) -> Tensor:
            return part.new_zeros(num_rows, *part.shape[1:]).index_copy_(0, rows, part)

        drafts = DraftIds(*map(scattered, self.drafts))
        catch_up, non_finite = scattered(self.catch_up), scattered(self.non_finite)
        looked_up = scattered(self.looked_up)
        return Drafted(drafts, catch_up, non_finite, self.failed, self.error, looked_up)


class Drafting:
    """Runs the drafter. Not thread-safe: every call comes from the step thread."""

    def __init__(
        self,
        drafter: Drafter | DeviceDrafter | None,
        ops: StepOps,
        state: SlotState,
        tp: TensorParallel,
        *,
        vocab_size: int,
        max_proposed: int,
        most_drafts: int,
        reads_freely: bool,
    ) -> None:
        """Check drafts where they can be read freely; elsewhere they stay on the device.

        Of a window the drafter proposes `max_proposed` drafts at most; `most_drafts` includes those
        that its grammar forces.
        """
        self._state, self._tp = state, tp
        self._vocab_size, self._most_drafts = vocab_size, most_drafts
        self._stateful = drafter if isinstance(drafter, DeviceDrafter) else None
        self._find: Find | None = None  # what repeats itself; None: that is not looked up apart
        self.head: DraftSteps | None = None
        self._propose: Propose | None = None  # None: nothing is drafted
        if isinstance(drafter, DeviceDrafter):
            self.head = drafter.on_device(ops, state)
            self._find = self.head.look_up
            self._propose = _HeadDrafts(self.head, vocab_size, checks=reads_freely)
        elif isinstance(drafter, NgramDrafter) and reads_freely:
            self._find = partial(drafter.look_up, state)
        elif drafter is not None and reads_freely:
            self._propose = Proposals(drafter, state, tp, vocab_size, max_proposed)
        elif drafter is not None:
            self._propose = UnreadProposals(drafter, state, vocab_size, most_drafts)
        self.faults = 0  # of this epoch

    @property
    def has_state(self) -> bool:
        """Return whether the drafter follows what is committed."""
        return self._stateful is not None

    def skips(self, known_faults: int) -> bool:
        """Return whether a plan does not know of the newest fault yet: it must not draft.

        Raises LedgerError for a plan that knows of more faults than there were.
        """
        if known_faults > self.faults:
            raise LedgerError(f"plan knows {known_faults} drafter faults, there were {self.faults}")
        return known_faults < self.faults

    def head_inputs(
        self, slot: IntArray, max_drafts: IntArray, catch_up: IntArray, draw: DrawParams[HostColumn]
    ) -> HeadInputs[HostColumn] | None:
        """Return what a draft head is sent for rows [R]; None without one."""
        return self.head.inputs(slot, max_drafts, catch_up, draw) if self.head is not None else None

    def run(self, inputs: DraftInputs, shape: DraftShape) -> Drafted:
        """Draft for every row. A drafter that fails leaves no drafts."""
        drafted = self._attempt(lambda: self._draft(inputs, shape))
        return drafted or self.nothing(len(inputs.slot), failed=True)

    def look_up(self, slot: IntArray, room: IntArray) -> Drafted:
        """Draft what repeats itself, at most `room` [R] each, where nothing else is wanted of the
        drafter. Only of drafts that can be read freely."""
        columns = (torch.from_numpy(column.astype(np.int32)) for column in (slot, room))
        drafted = self._attempt(lambda: self._look_up(*columns))
        return drafted or self.nothing(len(slot), failed=True)

    def _look_up(self, slot: Tensor, room: Tensor) -> Drafted:
        assert self._find is not None
        drafts = self._find(slot, room)
        check_drafts(drafts, room, self._vocab_size)
        zeros = torch.zeros_like(drafts.counts)
        return self._filled(drafts, zeros, zeros.new_zeros(1))

    def nothing(self, num_rows: int, *, failed: bool = False) -> Drafted:
        """Return no drafts for any row."""
        words = partial(torch.zeros, dtype=torch.int32, device=self._state.tokens.device)
        drafts = DraftIds(words(num_rows, self._most_drafts), words(num_rows))
        return Drafted(drafts, drafts.counts, drafts.counts, failed, words(1), drafts.counts)

    def _draft(self, inputs: DraftInputs, shape: DraftShape) -> Drafted:
        if self._propose is None:
            return self.nothing(len(inputs.slot))
        zeros = torch.zeros_like(inputs.max_drafts)
        catch_up, error = inputs.catch_up if self.has_state else zeros, zeros.new_zeros(1)
        return self._filled(self._propose(inputs, shape, error), catch_up, error)

    def _filled(self, drafts: Drafts, catch_up: Tensor, error: Tensor) -> Drafted:
        """Return drafts with room for forced ones, and zeros for what is not told."""
        zeros = torch.zeros_like(drafts.counts)
        non_finite = zeros if drafts.non_finite is None else drafts.non_finite
        missing = self._most_drafts - drafts.ids.shape[1]  # room for forced drafts
        ids = functional.pad(drafts.ids, (0, missing)) if missing else drafts.ids
        proposed = DraftIds(ids, drafts.counts)
        looked_up = zeros if drafts.looked_up is None else drafts.looked_up
        return Drafted(proposed, catch_up, non_finite, False, error, looked_up)

    def observe(self, rows: Rows, n_drafts: IntArray, n_accepted: IntArray) -> None:
        """Report to a drafter with state how many of its drafts for rows [R] were accepted."""
        drafter, drafted = self._stateful, n_drafts > 0
        if drafter is not None and drafted.any():
            columns = rows.slot[drafted], n_drafts[drafted], n_accepted[drafted]
            self._attempt(lambda: drafter.observe(*columns))

    def _attempt(self, work: Callable[[], T]) -> T | None:
        """Return what `work` returns, or None after an exception, which is counted.

        Raises DrafterFault instead where other ranks may not have had the same exception.
        """
        try:
            return work()
        except Exception as error:
            if self._find is not None and self._tp.size > 1:
                raise DrafterFault(f"the drafter failed: {error!r}") from error
            logger.exception("the drafter failed, the step goes on without it")
            self.faults += 1
            return None


class _HeadDrafts:
    """Drafts of a draft head on the device."""

    def __init__(self, head: DraftSteps, vocab_size: int, *, checks: bool) -> None:
        self._head, self._vocab_size, self._checks = head, vocab_size, checks

    def __call__(self, inputs: DraftInputs, shape: DraftShape, error: Tensor) -> Drafts:
        assert inputs.head is not None
        drafts = self._head.draft(inputs, inputs.head, shape, error)
        if self._checks:
            most = torch.maximum(inputs.max_drafts, inputs.max_looked_up)
            check_drafts(drafts, most, self._vocab_size)
        return drafts


class UnreadProposals:
    """Drafts of a drafter without state that stay on the device."""

    def __init__(
        self, drafter: Drafter, state: SlotState, vocab_size: int, most_drafts: int
    ) -> None:
        self._drafter, self._state = drafter, state
        self._vocab_size, self._most_drafts = vocab_size, most_drafts

    def __call__(self, inputs: DraftInputs, shape: DraftShape, error: Tensor) -> Drafts:
        """Return drafts cut to max_drafts [R] valid ids."""
        if not shape.num_drafts:
            zeros = torch.zeros_like(inputs.max_drafts)
            return Drafts(zeros.new_zeros(len(zeros), self._most_drafts), zeros)
        state, line, caps = self._state, inputs.slot.long(), inputs.max_drafts.long()
        ids, counts, *_ = self._drafter.propose(state.tokens, line, state.known[line].long(), caps)
        real = (ids >= 0) & (ids < self._vocab_size)  # they end at the first invalid id
        counts = torch.minimum(torch.minimum(counts, caps), real.int().cumprod(dim=1).sum(dim=1))
        return Drafts(torch.where(real, ids, 0).int(), counts.int())


class _Mark(IntEnum):
    """Report of rank 0 to the others on a row, beside its drafts."""

    FINE = 0
    NON_FINITE = 1
    FAILED = 2


class Proposals:
    """Checks what rank 0 proposes, and broadcasts it: all ranks verify the same drafts."""

    def __init__(
        self,
        drafter: Drafter,
        state: SlotState,
        tp: TensorParallel,
        vocab_size: int,
        max_proposed: int,
    ) -> None:
        self._drafter, self._state, self._tp = drafter, state, tp
        self._vocab_size, self._max_proposed = vocab_size, max_proposed

    def __call__(self, inputs: DraftInputs, shape: DraftShape, error: Tensor) -> Drafts:
        """Return at most max_drafts drafts for each row [R].

        Raises, on all ranks, when the drafter of rank 0 raises or its proposals are invalid.
        """
        slot, max_drafts = inputs.slot.long(), inputs.max_drafts.long()
        packed = torch.zeros(len(slot), self._max_proposed + 2, dtype=torch.int64)
        failure = None if self._tp.rank else self._fill(slot, max_drafts, packed)
        packed = self._tp.broadcast(packed)
        if (packed[:, -1] == _Mark.FAILED).any():
            raise failure or InternalError("the drafter of rank 0 failed")
        ids, counts, marks = packed[:, :-2].int(), packed[:, -2].int(), packed[:, -1]
        return Drafts(ids, counts, (marks == _Mark.NON_FINITE).int())

    def _fill(self, slot: Tensor, max_drafts: Tensor, packed: Tensor) -> Exception | None:
        """Fill in ids, count and mark of each row. Return the exception of a failed drafter."""
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
    if (drafts.counts.numpy() > max_drafts.numpy()).any():
        raise InternalError("the drafter proposed more than it may")
    ids = drafts.ids.numpy()
    if ids.min(initial=0) < 0 or ids.max(initial=0) >= vocab_size:
        raise InternalError("the drafter proposed an id outside the vocabulary")
