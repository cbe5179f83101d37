"""The soft cap of Gemma's logits."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class SoftCap(Protocol):
    """Compute soft_cap_reference."""

    def __call__(self, x: Tensor, cap: float) -> None: ...


def soft_cap_reference(x: Tensor, cap: float) -> None:
    """Replace x f32[N, V] by cap * tanh(x / cap) in place."""
    x.div_(cap).tanh_().mul_(cap)
