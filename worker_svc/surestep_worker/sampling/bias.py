"""allowed_token_ids and logit_bias."""

from __future__ import annotations

import numpy as np
import torch
from surestep_kernels.choose import SATURATED
from surestep_proto import engine_pb2 as pb

from .features import Rows

_NEVER = float("-inf")


class TokenBias:
    """Both parameters as one vector that is added to the logits: -inf forbids."""

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device) -> None:
        self.active = torch.zeros(num_slots, dtype=torch.bool)
        self._vocab_size = vocab_size
        self._device = device
        self._bias: dict[int, torch.Tensor] = {}  # slot -> f32[V]

    def admit(self, slot: int, params: pb.SamplingParams) -> None:
        if not params.allowed_token_ids and not params.logit_bias:
            return
        bias = torch.zeros(self._vocab_size)
        if params.allowed_token_ids:
            bias.fill_(_NEVER)
            bias[torch.from_numpy(np.array(params.allowed_token_ids, dtype=np.int64))] = 0.0
        for token_id, value in params.logit_bias.items():
            bias[token_id] += value
        self._bias[slot] = bias.to(self._device)
        self.active[slot] = True

    def free(self, slot: int) -> None:
        self._bias.pop(slot, None)
        self.active[slot] = False

    def apply(self, z: torch.Tensor, rows: Rows) -> None:
        slots, which = torch.unique(rows.slot, return_inverse=True)
        z += torch.stack([self._bias[slot] for slot in slots.tolist()])[which]
        z.clamp_(max=SATURATED)
