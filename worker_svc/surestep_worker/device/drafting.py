"""Drafting on the device: what fails costs drafts, exactly as in surestep_worker.drafting."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import NamedTuple

import torch
from surestep_common.errors import DrafterFault, InvalidRequest
from surestep_kernels.slot_state import DraftIds, SlotState, StepRows
from surestep_kernels.step_ops import StepOps
from torch import Tensor

from surestep_worker.drafting import made_too_early
from surestep_worker.parts import Parts
from surestep_worker.plan import IntArray, Rows
from surestep_worker.spec import Drafter, StatefulDrafter
from surestep_worker.spec.mtp import MtpDrafter

from .mtp import DeviceMtp, DraftShape, MtpInputs

logger = logging.getLogger(__name__)


class Drafted(NamedTuple):
    """Drafts of all rows of a step."""

    drafts: DraftIds  # [R]
    catch_up: Tensor  # i32[R] positions that the drafter's state follows by, at most
    non_finite: Tensor  # i32[R] 1: drafting met logits that were not finite
    failed: bool


class DeviceDrafting:
    """Runs the drafter. Not thread-safe: every call comes from the step thread."""

    def __init__(self, parts: Parts, ops: StepOps, state: SlotState) -> None:
        """Raises InvalidRequest for a drafter whose state cannot live on a device."""
        drafter = parts.drafter
        self._drafter, self._state = drafter, state
        self._tp, self._device = parts.tp, parts.device
        self._max_drafts, self._vocab_size = parts.max_draft_tokens, parts.model.config.vocab_size
        self.mtp: DeviceMtp | None = None
        if isinstance(drafter, MtpDrafter):
            self.mtp = DeviceMtp(drafter, parts, ops, state)
        elif isinstance(drafter, StatefulDrafter):
            raise InvalidRequest("this drafter runs on the CPU only", param="speculative_config")
        self.faults = 0  # of this epoch

    def skips(self, known_faults: int) -> bool:
        """Whether a plan that knows of so many faults was made too early to draft.

        Raises LedgerError for a plan that knows of faults that never were.
        """
        return made_too_early(known_faults, self.faults)

    def run(
        self,
        rows: StepRows,
        k_cap: Tensor,
        mtp: MtpInputs | None,
        shape: DraftShape,
        error: Tensor,
    ) -> Drafted:
        """Draft at most k_cap i32[R] tokens for every row."""
        faults = self.faults
        with self._guarded():
            if self.mtp is not None:
                assert mtp is not None
                own = self.mtp.draft(rows, k_cap, mtp, shape, error)
                return Drafted(own.drafts, rows.catch_up, own.non_finite, failed=False)
            if self._drafter is not None and shape.num_drafts:
                drafts, zeros = self._propose(self._drafter, rows.slot, k_cap), k_cap * 0
                return Drafted(drafts, zeros, zeros, failed=False)
        ids = torch.zeros(len(k_cap), self._max_drafts, dtype=torch.int32, device=self._device)
        zeros = k_cap * 0
        return Drafted(DraftIds(ids, zeros), zeros, zeros, failed=self.faults > faults)

    def observe(self, rows: Rows, n_drafts: IntArray, n_accepted: IntArray) -> None:
        """A drafter with state learns how its drafts for rows [R] fared."""
        drafted = n_drafts > 0
        if isinstance(self._drafter, StatefulDrafter) and drafted.any():
            with self._guarded():
                self._drafter.observe(rows.slot[drafted], n_drafts[drafted], n_accepted[drafted])

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[None]:
        """An exception is counted, unless other ranks may not share it."""
        try:
            yield
        except Exception as error:
            if self.mtp is not None and self._tp.size > 1:
                raise DrafterFault(f"the drafter failed: {error!r}") from error
            logger.exception("the drafter failed, the step goes on without it")
            self.faults += 1

    def _propose(self, drafter: Drafter, slot: Tensor, k_cap: Tensor) -> DraftIds:
        """Of a drafter without state; rows that may have no drafts get none."""
        state, line, caps = self._state, slot.long(), k_cap.long()
        ids, counts, _ = drafter.propose(state.tokens, line, state.known[line].long(), caps)
        real = (ids >= 0) & (ids < self._vocab_size)  # drafts end where they make no sense
        counts = torch.minimum(torch.minimum(counts, caps), real.int().cumprod(dim=1).sum(dim=1))
        return DraftIds(torch.where(real, ids, 0).int(), counts.int())
