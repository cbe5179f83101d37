"""Repetition, presence and frequency penalties, computed from the token table at every step.

No counts are stored: a count that is kept must be rolled back with every rejected draft, one that
is recomputed cannot be wrong.
"""

from __future__ import annotations

import torch
from surestep_kernels.choose import SATURATED
from surestep_proto import engine_pb2 as pb

from .features import Rows


class Penalties:
    """repetition_penalty (prompt and output), presence_ and frequency_penalty (output only)."""

    def __init__(self, num_slots: int, device: torch.device) -> None:
        self.active = torch.zeros(num_slots, dtype=torch.bool)
        self._repetition = torch.ones(num_slots, device=device)
        self._presence = torch.zeros(num_slots, device=device)
        self._frequency = torch.zeros(num_slots, device=device)

    def admit(self, slot: int, params: pb.SamplingParams) -> None:
        self._repetition[slot] = params.repetition_penalty
        self._presence[slot] = params.presence_penalty
        self._frequency[slot] = params.frequency_penalty
        self.active[slot] = (
            params.repetition_penalty != 1
            or params.presence_penalty != 0
            or params.frequency_penalty != 0
        )

    def free(self, slot: int) -> None:
        self.active[slot] = False

    def apply(self, z: torch.Tensor, rows: Rows) -> None:
        length = rows.length.unsqueeze(1)
        column = torch.arange(int(length.max()), device=z.device)
        history = rows.tokens[rows.slot, : column.numel()].long()
        # Columns behind the history repeat its first token: every write below is idempotent.
        history = torch.where(column < length, history, history[:, :1])
        is_output = (column >= rows.prompt_len.unsqueeze(1)) & (column < length)
        counts = torch.zeros_like(z).scatter_add_(1, history, is_output.float()).gather(1, history)

        logits = z.gather(1, history)
        repetition = self._repetition[rows.slot].unsqueeze(1)
        logits = torch.where(logits > 0, logits / repetition, logits * repetition)
        logits -= self._frequency[rows.slot].unsqueeze(1) * counts
        logits -= self._presence[rows.slot].unsqueeze(1) * (counts > 0)
        z.scatter_(1, history, logits.clamp_(max=SATURATED))
