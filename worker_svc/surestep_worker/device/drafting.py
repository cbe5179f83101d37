"""Drafting on the device: what fails costs drafts, exactly as in surestep_worker.drafting."""

from __future__ import annotations

import logging
from typing import NamedTuple

import numpy as np
import torch
from surestep_kernels.slot_state import DraftIds, SlotState
from surestep_proto import engine_pb2 as pb
from torch import Tensor

from surestep_worker.drafting import made_too_early
from surestep_worker.plan import IntArray, Rows
from surestep_worker.spec import Drafter

logger = logging.getLogger(__name__)


class Drafted(NamedTuple):
    """Drafts of all rows of a step."""

    drafts: DraftIds  # [R]
    skipped: bool  # the drafter failed, or had failed before the plan's author knew


class DeviceDrafting:
    """Runs a drafter without state. Not thread-safe: every call comes from the step thread."""

    def __init__(
        self, drafter: Drafter | None, *, max_drafts: int, vocab_size: int, device: torch.device
    ) -> None:
        self._drafter, self._device = drafter, device
        self._max_drafts, self._vocab_size = max_drafts, vocab_size
        self.faults = 0  # of this epoch

    def run(self, rows: Rows, slot: Tensor, state: SlotState, known_faults: int) -> Drafted:
        """Draft for the VERIFY rows; `slot` i32[R] is that of each row.

        Raises LedgerError for a plan that knows of faults that never were.
        """
        nothing = DraftIds(*self._zeros(len(rows)))
        if made_too_early(known_faults, self.faults):
            return Drafted(nothing, skipped=True)
        verify_rows = np.flatnonzero(rows.mode == pb.VERIFY)
        if self._drafter is None or not len(verify_rows):
            return Drafted(nothing, skipped=False)
        try:
            return Drafted(self._propose(self._drafter, rows.k_cap, slot, state), skipped=False)
        except Exception:
            logger.exception("the drafter failed, the step goes on without it")
            self.faults += 1
            return Drafted(nothing, skipped=True)

    def _propose(
        self, drafter: Drafter, k_cap: IntArray, slot: Tensor, state: SlotState
    ) -> DraftIds:
        """Drafts for all rows; those that may have none get none."""
        caps = torch.from_numpy(k_cap).to(self._device, non_blocking=True)
        line = slot.long()
        ids, counts, _ = drafter.propose(state.tokens, line, state.known[line].long(), caps)
        real = (ids >= 0) & (ids < self._vocab_size)  # drafts end where they make no sense
        counts = torch.minimum(torch.minimum(counts, caps), real.int().cumprod(dim=1).sum(dim=1))
        return DraftIds(torch.where(real, ids, 0).int(), counts.int())

    def _zeros(self, num_rows: int) -> tuple[Tensor, Tensor]:
        ids = torch.zeros(num_rows, self._max_drafts, dtype=torch.int32, device=self._device)
        return ids, torch.zeros(num_rows, dtype=torch.int32, device=self._device)
