"""From what a step did to the StepResult that reports it."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from surestep_proto import engine_pb2 as pb

from .models import fingerprint
from .plan import IntArray, Rows
from .sampling import Verdict

if TYPE_CHECKING:
    from .gather import Gathered
    from .runner import Parts


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """Counts per row [R] of a step; `tokens` stay in the verdict's windows."""

    len_before: IntArray
    n_drafts: IntArray
    status: IntArray
    n_accepted: IntArray
    n_emitted: IntArray
    verdict: Verdict

    @classmethod
    def nothing_chosen(
        cls, len_before: IntArray, n_drafts: IntArray, verdict: Verdict
    ) -> StepOutcome:
        """An outcome in which every row is OK and emitted nothing."""
        zeros = np.zeros(len(len_before), dtype=np.int64)
        return cls(len_before, n_drafts, zeros + pb.OK, zeros.copy(), zeros.copy(), verdict)

    @property
    def token_ids(self) -> IntArray:
        """Emitted ids of all rows in row order, CSR by n_emitted."""
        tokens = self.verdict.tokens
        ids: IntArray = tokens[np.arange(tokens.shape[1]) < self.verdict.n_emitted[:, None]]
        return ids
