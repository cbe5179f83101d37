"""The drafter as a fault domain of its own: when it fails, the step goes on without it.

A fault costs the drafts of its step, and those of plans that were made before the scheduler had
heard of it: such plans carry a smaller count of faults than the worker's own. The drafter's state
stays where it was, so that it can be caught up with when drafting is tried again.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from enum import IntEnum
from typing import NamedTuple

import numpy as np
import torch
from surestep_common.errors import DrafterFault, InternalError
from surestep_common.invariants import LedgerError
from surestep_proto import engine_pb2 as pb

from .plan import IntArray, Rows
from .plan_check import check_caught_up
from .slots import Slots
from .spec import Drafter, Drafts, StatefulDrafter
from .tp import TensorParallel

logger = logging.getLogger(__name__)


class Drafted(NamedTuple):
    """Drafts of all rows of a step, and how the drafter fared."""

    drafts: Drafts  # [R]
    skipped: bool  # the drafter failed, or had failed before the plan's author knew
    non_finite_rows: IntArray  # whose drafting met logits that were not finite


class _Mark(IntEnum):
    """What rank 0 tells the others of a row beside its drafts."""

    FINE = 0
    NON_FINITE = 1
    FAILED = 2


def made_too_early(known: int, faults: int) -> bool:
    """Whether a plan that knows of `known` drafter faults was made before all `faults` were told.

    Raises LedgerError for a plan that knows of faults that never were.
    """
    if known > faults:
        raise LedgerError(f"plan knows {known} drafter faults, there were {faults}")
    return known < faults


class Drafting:
    """Runs the drafter of one rank. Not thread-safe: every call comes from the step thread."""

    def __init__(
        self,
        drafter: Drafter | None,
        slots: Slots,
        tp: TensorParallel,
        *,
        max_drafts: int,
        vocab_size: int,
    ) -> None:
        self._drafter = drafter
        self._stateful = drafter if isinstance(drafter, StatefulDrafter) else None
        self._slots, self._tp = slots, tp
        self._max_drafts, self._vocab_size = max_drafts, vocab_size
        self._failed = False  # in this step, or behind the one before
        self.faults = 0  # of this epoch; equal on all ranks

    def open(self) -> None:
        """Begin an epoch."""
        self.faults, self._failed = 0, False

    def run(self, rows: Rows, known_faults: int) -> Drafted:
        """Catch up, then draft for the VERIFY rows, as the plan says; rank 0 proposes for all.

        Raises LedgerError for a plan that contradicts the books, and DrafterFault when ranks that
        draft together cannot tell whether the others failed too: the epoch is then over.
        """
        if made_too_early(known_faults, self.faults):
            return self._nothing(rows, skipped=True)
        upto = self._slots.draft_upto[rows.slot]
        self._catch_up(rows)
        drafted = self._draft(rows)
        if not self._failed:
            return drafted
        self._failed = False
        self.faults += 1
        self._slots.draft_upto[rows.slot] = upto
        return self._nothing(rows, skipped=True)

    def observe(self, rows: Rows, n_drafts: IntArray, n_accepted: IntArray) -> None:
        """A drafter with state learns how its drafts for rows [R] fared."""
        drafted = n_drafts > 0
        if self._stateful is not None and drafted.any():
            with self._guarded():
                self._stateful.observe(rows.slot[drafted], n_drafts[drafted], n_accepted[drafted])

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[None]:
        """Any exception of the drafter becomes `_failed`, unless other ranks may not share it."""
        try:
            yield
        except Exception as error:
            if self._stateful is not None and self._tp.size > 1:
                raise DrafterFault(f"the drafter failed: {error!r}") from error
            logger.exception("the drafter failed, the step goes on without it")
            self._failed = True

    def _catch_up(self, rows: Rows) -> None:
        """The drafter's own state follows the committed tokens, as far as the plan says."""
        drafter, slots = self._stateful, self._slots
        if drafter is None:
            return
        start = slots.draft_upto[rows.slot]
        count = np.minimum(rows.catch_up, slots.committed[rows.slot] - start)
        lags = count > 0
        if lags.any() and not self._failed:
            with self._guarded():
                drafter.catch_up(rows.slot[lags], start[lags], count[lags])
        slots.draft_upto[rows.slot] += count
        check_caught_up(rows, slots)

    def _draft(self, rows: Rows) -> Drafted:
        result = self._nothing(rows, skipped=False)
        verify_rows = np.flatnonzero(rows.mode == pb.VERIFY)
        if not len(verify_rows):
            return result
        slot = rows.slot[verify_rows]
        packed = self._proposal(slot, rows.max_drafts[verify_rows])
        ids, counts, marks = packed[:, :-2], packed[:, -2], packed[:, -1]
        self._failed |= bool((marks == _Mark.FAILED).any())
        result.drafts.ids[verify_rows], result.drafts.counts[verify_rows] = ids, counts
        self._slots.write_drafts(slot, ids.numpy(), counts.numpy())
        non_finite = verify_rows[(marks == _Mark.NON_FINITE).numpy()]
        return result._replace(non_finite_rows=non_finite)

    def _proposal(self, slot: IntArray, k_cap: IntArray) -> torch.Tensor:
        """Ids, count and mark of slots [R] as i64[R, K + 2], the same on all ranks."""
        packed = torch.zeros(len(slot), self._max_drafts + 2, dtype=torch.int64)
        if (self._tp.rank == 0 or self._stateful is not None) and not self._failed:
            with self._guarded():
                drafts = self._propose(slot, k_cap)
                packed[:, :-2], packed[:, -2] = drafts.ids, drafts.counts
                if drafts.non_finite is not None:
                    packed[:, -1] = drafts.non_finite * _Mark.NON_FINITE
        if self._failed:
            packed[:, -2], packed[:, -1] = 0, _Mark.FAILED
        return self._tp.broadcast(packed)

    def _propose(self, slot: IntArray, k_cap: IntArray) -> Drafts:
        assert self._drafter is not None, "VERIFY rows without a drafter"
        proposed = self._drafter.propose(
            self._slots.tokens,
            torch.from_numpy(slot),
            torch.from_numpy(self._slots.known[slot]),
            torch.from_numpy(k_cap),
        )
        if bool((proposed.counts > torch.from_numpy(k_cap)).any()):
            raise InternalError("the drafter proposed more than it may")
        if not bool(((proposed.ids >= 0) & (proposed.ids < self._vocab_size)).all()):
            raise InternalError("the drafter proposed an id outside the vocabulary")
        return proposed

    def _nothing(self, rows: Rows, *, skipped: bool) -> Drafted:
        ids = torch.zeros(len(rows), self._max_drafts, dtype=torch.int64)
        counts = torch.zeros(len(rows), dtype=torch.int64)
        return Drafted(Drafts(ids, counts), skipped, np.zeros(0, dtype=np.int64))
