"""The gated activation of a Llama-style MLP."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional


def silu_and_mul_reference(x: Tensor) -> Tensor:
    """Return silu(gate) * up [T, I], where x [T, 2I] holds gate in its first half and up in its
    second.

    silu is rounded to x's dtype before the product, as in the published models.
    """
    gate, up = x.chunk(2, dim=-1)
    return functional.silu(gate) * up
