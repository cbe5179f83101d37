"""Matrix product with a weight that is packed once, when the model loads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional


@dataclass(frozen=True, slots=True, eq=False)
class PackedLinear:
    """A weight in the layout of the KernelSet that packed it; opaque to everyone else."""

    data: Tensor
    bias: Tensor | None  # [out_features], or longer
    in_features: int
    out_features: int


class PackLinear(Protocol):
    """weight [N, K] and bias [N] to the KernelSet's own layout."""

    def __call__(self, weight: Tensor, bias: Tensor | None = None) -> PackedLinear: ...


class Linear(Protocol):
    """x [T, K] times the packed weight, plus its bias: [T, N] in out_dtype (x's by default)."""

    def __call__(
        self, x: Tensor, packed: PackedLinear, out_dtype: torch.dtype | None = None
    ) -> Tensor: ...


def pack_linear_reference(weight: Tensor, bias: Tensor | None = None) -> PackedLinear:
    """Keep weight [N, K] and bias [N] as they are."""
    return PackedLinear(weight, bias, in_features=weight.shape[1], out_features=weight.shape[0])


def linear_reference(
    x: Tensor, packed: PackedLinear, out_dtype: torch.dtype | None = None
) -> Tensor:
    """x [T, K] -> [T, N]. A wider out_dtype widens the rounded product, nothing more."""
    return functional.linear(x, packed.data, packed.bias).to(out_dtype or x.dtype)
