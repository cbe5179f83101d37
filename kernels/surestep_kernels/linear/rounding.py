"""Weights rounded while they are loaded: to codes of 8 or 4 bits in groups, or to FP8."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from .quantized import QuantizedWeight

GROUP = 32  # inputs that share a scale and a min
_FP8_GROUP = 128
_FP8_MOST = 448.0  # the largest number of E4M3
_FP8_BITS = 4  # of a number: the leading one and three behind it
_MOST_BITS = 8
_ELEMENTS = 1 << 18  # rounded at once: in memory that is used again and stays in a core's cache


@dataclass(frozen=True, slots=True)
class Rounding:
    """Rounding of weights, to nearest: numbers of a group have `bits` bits between its
    smallest and its largest, or are FP8 (E4M3) times a scale."""

    bits: int
    fp8: bool = False

    @property
    def group(self) -> int:
        """Number of inputs that share a scale."""
        return _FP8_GROUP if self.fp8 else GROUP

    def keeping(self, bits: int) -> Rounding | None:
        """Return what leaves so many bits of a number, at the least: this or a finer one, or None.

        FP8 is not replaced: what is rounded to it shall be served on any device.
        """
        if self.fp8:
            return self if bits <= _FP8_BITS else None
        return Rounding(max(bits, self.bits)) if bits <= _MOST_BITS else None

    def nbytes(self, elements: int) -> int:
        """Return the approximate size of so many elements, packed."""
        return elements * self.bits // 8 + elements // self.group * 4

    def __call__(self, weight: Tensor) -> QuantizedWeight:
        """Round a weight [N, K]. Raises ValueError for one that holds NaN or infinities."""
        return _to_fp8(weight) if self.fp8 else rounded(weight, self.bits)


INT8, INT4, FP8 = Rounding(8), Rounding(4), Rounding(8, fp8=True)
ROUNDINGS = {"fp8": FP8, "int8": INT8, "int4": INT4}


def rounded(weight: Tensor, bits: int) -> QuantizedWeight:
    """Return the weight [N, K] with codes of 4 or 8 bits, which span each group of GROUP inputs.

    Scales and mins are numbers that float16 can hold, but for groups too large for that. Raises
    ValueError as Rounding does.
    """
    rows, columns = weight.shape
    codes = torch.empty(rows, columns, dtype=torch.uint8)
    scales = torch.empty(rows, -(-columns // GROUP))
    mins, most = torch.empty_like(scales), (1 << bits) - 1
    for part in _parts(rows, columns):
        groups = _grouped(weight[part], GROUP)
        low, high = groups.aminmax(dim=-1)
        mins[part] = low = _in_fp16(low)
        # Rounded to nearest, a scale may be too small to reach the ends by half of its last bit.
        scales[part] = step = _in_fp16((high - low) / most)
        steps = (groups - low[..., None]).div_(step.where(step > 0, 1.0)[..., None])
        codes[part] = steps.round_().clamp_(0, most).flatten(1)[:, :columns]
    return QuantizedWeight(codes, _finite(scales), None, GROUP, mins, bits)


def _to_fp8(weight: Tensor) -> QuantizedWeight:
    """Return the weight [N, K] in FP8, the largest element of a group at the largest number."""
    rows, columns = weight.shape
    codes = torch.empty(rows, columns, dtype=torch.float8_e4m3fn)
    scales = torch.empty(rows, -(-columns // _FP8_GROUP))
    for part in _parts(rows, columns):
        groups = _grouped(weight[part], _FP8_GROUP)
        scales[part] = step = groups.abs().amax(dim=-1) / _FP8_MOST
        steps = groups / step.where(step > 0, 1.0)[..., None]
        codes[part] = steps.clamp_(-_FP8_MOST, _FP8_MOST).flatten(1)[:, :columns].to(codes.dtype)
    return QuantizedWeight(codes, _finite(scales), None, _FP8_GROUP)


def _finite(scales: Tensor) -> Tensor:
    """Return the scales, which are NaN or infinite where any element of their group is."""
    if not scales.isfinite().all():
        raise ValueError("some elements are NaN, infinite or too large")
    return scales


def _parts(rows: int, columns: int) -> list[slice]:
    step = max(1, _ELEMENTS // columns)
    return [slice(begin, begin + step) for begin in range(0, rows, step)]


def _grouped(weight: Tensor, group: int) -> Tensor:
    """Return f32[N, ceil(K / g), g]; a short group is padded with one of its own elements."""
    padding = -weight.shape[1] % group
    whole = functional.pad(weight.float()[None], (0, padding), mode="replicate")[0]
    return whole.reshape(len(weight), -1, group)


def _in_fp16(numbers: Tensor) -> Tensor:
    """Round those that float16 can hold, each by itself: it does not matter what is beside it."""
    shorter = numbers.half().float()
    return shorter.where(shorter.isfinite(), numbers)
