"""Matrix products with a weight that is packed once, when the model is loaded."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional


class WeightFormat(IntEnum):
    """Format of a packed weight's elements; numbered as in columns/cpu/linear.h."""

    F32 = 0
    BF16 = 1
    FP8 = 2
    INT4 = 3
    MXFP4 = 4
    AFFINE4 = 5  # scales and mins in fp16
    AFFINE8 = 6
    AFFINE4_F32 = 7  # in fp32
    AFFINE8_F32 = 8
    NVFP4 = 9


# What the 16 codes of E2M1 stand for: a sign, two bits of exponent, one of mantissa.
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
FP16_HEADERS = (WeightFormat.AFFINE4, WeightFormat.AFFINE8)
PLAIN_FORMATS = {torch.float32: WeightFormat.F32, torch.bfloat16: WeightFormat.BF16}


@dataclass(frozen=True, slots=True, eq=False)
class PackedLinear:
    """A weight in the layout of the KernelSet that packed it; opaque to everything else."""

    data: Tensor
    bias: Tensor | None  # [out_features], or longer
    in_features: int
    out_features: int
    format: WeightFormat
    group_size: int = 0  # inputs that share a scale
    scales: Tensor | None = None  # if the layout stores them apart from the data
    zeros: Tensor | None = None
    mins: Tensor | None = None


class PackedHeads(NamedTuple):
    """Weights of one size, one for each head."""

    weights: Sequence[PackedLinear]
    addresses: Tensor | None = None  # if the layout looks weights up on the device


class PackLinear(Protocol):
    """Pack weight [N, K] and bias [N] into the KernelSet's own layout."""

    def __call__(self, weight: Tensor, bias: Tensor | None = None) -> PackedLinear: ...


class Linear(Protocol):
    """Return x [T, K] times the packed weight plus its bias: [T, N] in out_dtype (default: x's)."""

    def __call__(
        self, x: Tensor, packed: PackedLinear, out_dtype: torch.dtype | None = None
    ) -> Tensor: ...


def pack_linear_reference(weight: Tensor, bias: Tensor | None = None) -> PackedLinear:
    """Keep weight [N, K] and bias [N] as they are."""
    rows, columns = weight.shape
    return PackedLinear(weight, bias, columns, rows, PLAIN_FORMATS[weight.dtype])


def linear_reference(
    x: Tensor, packed: PackedLinear, out_dtype: torch.dtype | None = None
) -> Tensor:
    """Map x [T, K] to [T, N]. A wider out_dtype only widens the rounded product."""
    if packed.scales is None:
        return functional.linear(x, packed.data, packed.bias).to(out_dtype or x.dtype)
    parts = packed.data, packed.scales, packed.zeros, packed.group_size
    weight = dequantize(*parts, packed.mins)
    bias = None if packed.bias is None else packed.bias.float()
    return functional.linear(x.float(), weight, bias).to(out_dtype or x.dtype)


def dequantize(
    codes: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    group_size: int,
    mins: Tensor | None = None,
) -> Tensor:
    """Return the weight f32[N, K] of a QuantizedWeight with these parts."""

    def per_element(per_group: Tensor) -> Tensor:
        return per_group.repeat_interleave(group_size, dim=1)[:, : codes.shape[1]]

    if codes.dtype is torch.uint8 and zeros is None and mins is None:
        values = torch.tensor(E2M1, device=codes.device)[codes.long()]
        scales = e8m0(scales) if scales.dtype is torch.uint8 else scales
    else:
        values = codes.float() if zeros is None else codes.float() - per_element(zeros)
    weight = values * per_element(scales)
    return weight if mins is None else weight + per_element(mins)


def e8m0(exponents: Tensor) -> Tensor:
    """Return 2^(e - 127) in f32 for exponents e u8[...] below 255; 0 makes a subnormal number."""
    return exponents.view(torch.float8_e8m0fnu).float()


class PlainProducts(Protocol):
    """The products with unquantised weights on a device that has several implementations."""

    @property
    def family(self) -> str:
        """The name of the implementation in use."""

    def register(self, weights: Iterable[PackedLinear]) -> None:
        """Register the weights that the model will use."""
