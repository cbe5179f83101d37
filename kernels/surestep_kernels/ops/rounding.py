"""Weights rounded to 8 or 4 bits, whose groups have a scale and a min."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from .quantized import QuantizedWeight

GROUP = 32  # inputs


def rounded(weight: Tensor, bits: int) -> QuantizedWeight:
    """Return the weight [N, K] with codes of 4 or 8 bits, which span each group of GROUP inputs.

    Scales and mins are numbers that float16 can hold, unless a weight is too large for that.
    """
    rows, columns = weight.shape
    most, padding = (1 << bits) - 1, -columns % GROUP
    # What a short group is padded with is one of its own elements.
    groups = functional.pad(weight.float()[None], (0, padding), mode="replicate")[0]
    groups = groups.view(rows, -1, GROUP)
    low, high = groups.aminmax(dim=-1)
    mins = _in_fp16(low)
    # Rounded to nearest, a scale may be too small to reach the ends by half of its last bit.
    scales = _in_fp16((high - mins) / most)
    steps = (groups - mins[..., None]) / scales.where(scales > 0, 1.0)[..., None]
    codes = steps.round().clamp(0, most).byte().view(rows, -1)[:, :columns].contiguous()
    return QuantizedWeight(codes, scales, None, GROUP, mins, bits)


def _in_fp16(numbers: Tensor) -> Tensor:
    shorter = numbers.half().float()
    return shorter if shorter.isfinite().all() else numbers
