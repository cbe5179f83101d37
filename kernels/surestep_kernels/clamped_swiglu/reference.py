"""The gated activation of gpt-oss's experts."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

ALPHA = 1.702  # of every published model; sigmoid(1.702 x) is near the normal distribution function


class ClampedSwiglu(Protocol):
    """Compute clamped_swiglu_reference."""

    def __call__(self, x: Tensor, limit: float) -> Tensor: ...


def clamped_swiglu_reference(x: Tensor, limit: float) -> Tensor:
    """Return (up + 1) * gate * sigmoid(ALPHA * gate), where x [T, 2I] holds gates, then ups.

    Gates above `limit` count as `limit`, ups are kept within -limit and limit. Returns [T, I],
    computed in fp32 and rounded once.
    """
    gate, up = x.float().chunk(2, dim=-1)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return ((up + 1) * (gate * torch.sigmoid(ALPHA * gate))).to(x.dtype)
