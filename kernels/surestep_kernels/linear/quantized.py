"""Weights of 8 or 4 bits whose elements share scales in groups: their meaning, and a reference."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from .reference import FP16_HEADERS, PackedLinear, WeightFormat, dequantize

MAX_GROUP = 128  # as in columns/cpu/linear.h
GROUP_MULTIPLE = 8  # elements of a group: whole 32-bit lanes of any format
MXFP4_GROUP = 32
E8M0_NAN = 255


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedWeight:
    """A weight [N, K]: W[n, k] = (value of codes[n, k] - zeros[n, k // g]) * scales[n, k // g],
    or, with `mins`, codes[n, k] * scales[n, k // g] + mins[n, k // g].

    FP8 has codes in float8_e4m3fn without NaN, and no zeros. INT4 has the numbers 0 to 15 in uint8,
    and scales that float16 or bfloat16 can hold. In both the last group may be short. MXFP4 (OCP
    Microscaling Formats 1.0) has E2M1 codes in uint8, full groups of 32, no zeros, and powers of
    two for scales, of which the exponents plus 127 are kept: E8M0 without NaN. AFFINE has mins, and
    numbers of `bits` bits in uint8; scales and mins are any finite numbers, and the last group may
    be short. It is packed with those in float16 if this loses nothing, otherwise in float32. NVFP4
    has E2M1 codes as MXFP4, with any finite scales and no zeros; the last group may be short.
    """

    codes: Tensor  # [N, K]
    scales: Tensor  # f32[N, ceil(K / g)], or u8 of MXFP4
    zeros: Tensor | None  # u8[N, ceil(K / g)], 0 to 15; of INT4 only
    group_size: int  # g: a multiple of GROUP_MULTIPLE, MAX_GROUP at most
    mins: Tensor | None = None  # f32[N, ceil(K / g)]; of AFFINE only
    bits: int | None = None  # 4 or 8; of AFFINE only

    def __post_init__(self) -> None:
        rows, columns = self.codes.shape
        groups = (rows, -(-columns // self.group_size))
        assert 0 < self.group_size <= MAX_GROUP
        assert self.group_size % GROUP_MULTIPLE == 0
        assert self.codes.is_contiguous()
        assert self.scales.is_contiguous()
        assert self.scales.shape == groups
        if self.mins is not None:
            self._check_affine(self.mins)
            return
        assert self.bits is None
        if self.scales.dtype is torch.uint8:
            assert self.codes.dtype is torch.uint8
            assert self.zeros is None
            assert self.group_size == MXFP4_GROUP
            assert columns % MXFP4_GROUP == 0
            assert not (self.scales == E8M0_NAN).any()
            return
        assert self.scales.dtype is torch.float32
        if self.zeros is None:
            assert self.codes.dtype in (torch.float8_e4m3fn, torch.uint8)
            return
        assert self.codes.dtype is self.zeros.dtype is torch.uint8
        assert self.zeros.is_contiguous()
        assert self.zeros.shape == groups
        assert not (self.scales.view(torch.int32) & 0xF).any(), "more than 16 bits of scale"

    def _check_affine(self, mins: Tensor) -> None:
        assert self.zeros is None
        assert self.codes.dtype is torch.uint8
        assert self.bits in _AFFINE
        assert self.bits == 8 or self.codes.numel() == 0 or self.codes.amax() < 16
        assert self.scales.dtype is mins.dtype is torch.float32
        assert mins.is_contiguous()
        assert mins.shape == self.scales.shape
        assert self.scales.isfinite().all()
        assert mins.isfinite().all()

    @property
    def format(self) -> WeightFormat:
        """Format of a packed weight: codes, scales and mins. Reads all of the latter two."""
        if self.bits is not None and self.mins is not None:
            in_fp16 = _survives_fp16(self.scales) and _survives_fp16(self.mins)
            return _AFFINE[self.bits][0 if in_fp16 else 1]
        if self.scales.dtype is torch.uint8:
            return WeightFormat.MXFP4
        if self.zeros is not None:
            return WeightFormat.INT4
        return WeightFormat.NVFP4 if self.codes.dtype is torch.uint8 else WeightFormat.FP8

    @property
    def nbytes(self) -> int:
        """Size of the packed weight in bytes, without padding."""
        codes, format_ = self.codes.numel(), self.format
        if self.bits is not None:
            header = 4 if format_ in FP16_HEADERS else 8
            return codes * self.bits // 8 + self.scales.numel() * header
        return codes * (8 if format_ is WeightFormat.FP8 else 4) // 8 + self.scales.nbytes

    def dequantize(self) -> Tensor:
        """Return W: f32[N, K]."""
        return dequantize(self.codes, self.scales, self.zeros, self.group_size, self.mins)

    def rows(self, chosen: Tensor) -> QuantizedWeight:
        """Return the weight of the outputs i64[M], in this order."""
        # Whole rows are copied; an index would be looked up for each of their elements.
        codes = self.codes.view(torch.uint8).index_select(0, chosen).view(self.codes.dtype)
        zeros = None if self.zeros is None else self.zeros[chosen]
        mins = None if self.mins is None else self.mins[chosen]
        return replace(self, codes=codes, scales=self.scales[chosen], zeros=zeros, mins=mins)

    def inputs(self, first: int, count: int) -> QuantizedWeight:
        """Return the weight of `count` inputs from `first` on, which begins a group."""
        assert first % self.group_size == 0
        if count == self.codes.shape[1]:
            return self
        begin, end = first // self.group_size, -(-(first + count) // self.group_size)
        scales, zeros, mins = (
            None if part is None else part[:, begin:end].contiguous()
            for part in (self.scales, self.zeros, self.mins)
        )
        assert scales is not None
        codes = self.codes[:, first : first + count].contiguous()
        return replace(self, codes=codes, scales=scales, zeros=zeros, mins=mins)

    def padded(self, rows: int) -> QuantizedWeight:
        """Return the weight of `rows` outputs, of which those behind the present ones are 0."""
        more = rows - len(self.codes)
        if not more:
            return self
        codes, scales, zeros, mins = (
            None
            if part is None
            else functional.pad(part.view(torch.uint8), (0, 0, 0, more)).view(part.dtype)
            for part in (self.codes, self.scales, self.zeros, self.mins)
        )
        assert codes is not None
        assert scales is not None
        return replace(self, codes=codes, scales=scales, zeros=zeros, mins=mins)

    def regrouped(self, group_size: int) -> QuantizedWeight:
        """Return the same weight in smaller groups, whose size divides that of the present ones."""
        if group_size == self.group_size:
            return self
        assert self.group_size % group_size == 0
        groups, times = -(-self.codes.shape[1] // group_size), self.group_size // group_size
        scales, zeros, mins = (
            None if part is None else part.repeat_interleave(times, dim=1)[:, :groups].contiguous()
            for part in (self.scales, self.zeros, self.mins)
        )
        assert scales is not None
        return replace(self, scales=scales, zeros=zeros, mins=mins, group_size=group_size)


# The formats of affine weights whose codes have this many bits: with fp16, with fp32.
_AFFINE = {
    4: (WeightFormat.AFFINE4, WeightFormat.AFFINE4_F32),
    8: (WeightFormat.AFFINE8, WeightFormat.AFFINE8_F32),
}


def _survives_fp16(numbers: Tensor) -> bool:
    return torch.equal(numbers.half().float(), numbers)


def alike(weights: Sequence[QuantizedWeight]) -> bool:
    """Return whether weights are of one kind, so that they can be concatenated."""
    kinds = {(w.codes.dtype, w.scales.dtype, w.zeros is None, w.mins is None) for w in weights}
    return len(kinds) == 1


def concatenate(weights: Sequence[QuantizedWeight]) -> QuantizedWeight:
    """Concatenate weights with the same inputs and of one kind along their outputs.

    Groups become the largest that divide those of all weights, affine codes as wide as the widest.
    """
    if len(weights) == 1:
        return weights[0]
    group_size = math.gcd(*(w.group_size for w in weights))
    weights = [w.regrouped(group_size) for w in weights]
    codes = torch.cat([w.codes.view(torch.uint8) for w in weights]).view(weights[0].codes.dtype)
    scales = torch.cat([w.scales for w in weights])
    zeros = [w.zeros for w in weights if w.zeros is not None]
    mins = [w.mins for w in weights if w.mins is not None]
    bits = [w.bits for w in weights if w.bits is not None]
    return QuantizedWeight(
        codes,
        scales,
        torch.cat(zeros) if zeros else None,
        group_size,
        torch.cat(mins) if mins else None,
        max(bits, default=None),
    )


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
        mins=weight.mins,
    )
