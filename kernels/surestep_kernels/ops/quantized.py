"""Weights of 8 or 4 bits whose elements share scales in groups: their meaning, and a reference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from .linear import PackedLinear, WeightFormat

MAX_GROUP = 128  # as in cpu/linear.h
GROUP_MULTIPLE = 8  # elements of a group: whole 32-bit lanes of any format
MXFP4_GROUP = 32
E8M0_NAN = 255


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedWeight:
    """A weight [N, K]: W[n, k] = (value of codes[n, k] - zeros[n, k // g]) * scales[n, k // g].

    FP8 has codes in float8_e4m3fn without NaN, and no zeros. INT4 has the numbers 0 to 15 in uint8,
    and scales that float16 or bfloat16 can hold. In both the last group may be short. MXFP4 (OCP
    Microscaling Formats 1.0) has E2M1 codes in uint8, full groups of 32, no zeros, and powers of
    two for scales, of which the exponents plus 127 are kept: E8M0 without NaN.
    """

    codes: Tensor  # [N, K]
    scales: Tensor  # f32[N, ceil(K / g)], or u8 of MXFP4
    zeros: Tensor | None  # u8[N, ceil(K / g)], 0 to 15; of INT4 only
    group_size: int  # g: a multiple of GROUP_MULTIPLE, MAX_GROUP at most

    def __post_init__(self) -> None:
        rows, columns = self.codes.shape
        groups = (rows, -(-columns // self.group_size))
        assert 0 < self.group_size <= MAX_GROUP
        assert self.group_size % GROUP_MULTIPLE == 0
        assert self.codes.is_contiguous()
        assert self.scales.is_contiguous()
        assert self.scales.shape == groups
        if self.scales.dtype is torch.uint8:
            assert self.codes.dtype is torch.uint8
            assert self.zeros is None
            assert self.group_size == MXFP4_GROUP
            assert columns % MXFP4_GROUP == 0
            assert not (self.scales == E8M0_NAN).any()
            return
        assert self.scales.dtype is torch.float32
        if self.zeros is None:
            assert self.codes.dtype is torch.float8_e4m3fn
            return
        assert self.codes.dtype is self.zeros.dtype is torch.uint8
        assert self.zeros.is_contiguous()
        assert self.zeros.shape == groups
        assert not (self.scales.view(torch.int32) & 0xF).any(), "more than 16 bits of scale"

    @property
    def format(self) -> WeightFormat:
        """How a packed weight stores the codes."""
        if self.scales.dtype is torch.uint8:
            return WeightFormat.MXFP4
        return WeightFormat.FP8 if self.zeros is None else WeightFormat.INT4

    @property
    def nbytes(self) -> int:
        """Size of the packed weight in bytes, without padding."""
        bits = self.codes.numel() * (8 if self.format is WeightFormat.FP8 else 4)
        return bits // 8 + self.scales.nbytes

    def rows(self, chosen: Tensor) -> QuantizedWeight:
        """Return the weight of the outputs i64[M], in this order."""
        # Whole rows are copied; an index would be looked up for each of their elements.
        codes = self.codes.view(torch.uint8).index_select(0, chosen).view(self.codes.dtype)
        zeros = None if self.zeros is None else self.zeros[chosen]
        return QuantizedWeight(codes, self.scales[chosen], zeros, self.group_size)


def concatenate(weights: Sequence[QuantizedWeight]) -> QuantizedWeight:
    """Concatenate weights with the same inputs and groups along their outputs."""
    if len(weights) == 1:
        return weights[0]
    codes = torch.cat([w.codes.view(torch.uint8) for w in weights]).view(weights[0].codes.dtype)
    scales = torch.cat([w.scales for w in weights])
    zeros = [w.zeros for w in weights if w.zeros is not None]
    (group_size,) = {w.group_size for w in weights}
    return QuantizedWeight(codes, scales, torch.cat(zeros) if zeros else None, group_size)


class PackQuantized(Protocol):
    """Pack a quantised weight [N, K] and bias [N] into the KernelSet's layout for `linear`."""

    def __call__(self, weight: QuantizedWeight, bias: Tensor | None = None) -> PackedLinear: ...


def pack_quantized_reference(weight: QuantizedWeight, bias: Tensor | None = None) -> PackedLinear:
    """Keep the parts of the weight as they are."""
    rows, columns = weight.codes.shape
    return PackedLinear(
        weight.codes,
        bias,
        in_features=columns,
        out_features=rows,
        format=weight.format,
        group_size=weight.group_size,
        scales=weight.scales,
        zeros=weight.zeros,
    )
