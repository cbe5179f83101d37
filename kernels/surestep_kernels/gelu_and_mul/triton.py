"""The gated activation of Gemma's MLP in Triton."""

from __future__ import annotations

from torch import Tensor

from surestep_kernels.linear.splits import PartialSums
from surestep_kernels.silu_and_mul.triton import activate_partials


def gelu_and_mul(x: Tensor) -> Tensor:
    assert x.is_contiguous()
    return gelu_and_mul_of_partials(PartialSums.whole(x))


def gelu_and_mul_of_partials(x: PartialSums) -> Tensor:
    """Fuse gelu_and_mul_reference with adding up the splits of the product x."""
    return activate_partials(x, gelu=True)
