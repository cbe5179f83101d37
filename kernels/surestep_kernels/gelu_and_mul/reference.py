"""The gated activation of Gemma's MLP."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional


def gelu_and_mul_reference(x: Tensor) -> Tensor:
    """Return gelu(gate) * up [T, I], where x [T, 2I] holds gate in its first half and up in its
    second.

    gelu is the approximation by tanh (Hendrycks and Gimpel, 2016), rounded to x's dtype before the
    product, as in the published models.
    """
    gate, up = x.chunk(2, dim=-1)
    return functional.gelu(gate, approximate="tanh") * up
