"""The output gate of gated attention and of a shared expert."""

from __future__ import annotations

from torch import Tensor


def mul_sigmoid_reference(x: Tensor, gate: Tensor) -> None:
    """Multiply x [T, W] by sigmoid(gate) in place; gate is [T, W] or [T, 1]."""
    x *= gate.float().sigmoid().to(x.dtype)
