"""Activations rounded to FP8 on the fly, for weights that are FP8 themselves (W8A8).

Each group of inputs of each row has its own scale, as the weight's groups have, so that a row's
values do not depend on the rows beside it. (The 1 x 128 tiles of DeepSeek-V3, arXiv 2412.19437,
section 3.3, with power-of-two scales, as in its version 3.1.) A power of two changes no bit of the
significand: all that is lost is the significand beyond 4 bits, and numbers 2^17 below the largest
of their group.
"""

from __future__ import annotations

from functools import wraps

import torch
from torch import Tensor
from torch.nn import functional

from .reference import Linear, PackedLinear, WeightFormat

FP8_MAX = 448.0
# The scale's exponent is that of the largest number, less 8 (448 = 1.75 * 2^8), and one more if the
# significand is beyond 1.75: adding this to the bits carries then.
CARRY = 0x1FFFFF
INFINITY = 0x7F800000


def quantize_rows(x: Tensor, group_size: int) -> tuple[Tensor, Tensor]:
    """Quantise x [M, K] to codes float8_e4m3fn[M, K] and scales f32[M, ceil(K / g)], powers of two.

    Elements that are not finite become NaN.
    """
    rows, columns = x.shape
    parts = functional.pad(x.float(), (0, -columns % group_size)).view(rows, -1, group_size)
    bits = parts.abs().amax(dim=2).view(torch.int32).clamp(max=INFINITY)
    exponent = ((bits + CARRY >> 23) - 8).clamp(min=1)
    inverse = (254 - exponent << 23).view(torch.float32)
    codes = (parts * inverse[:, :, None]).view(rows, -1)[:, :columns]
    codes = codes.where(codes.abs() <= FP8_MAX, torch.nan).to(torch.float8_e4m3fn)
    return codes.contiguous(), (exponent << 23).view(torch.float32)


def round_rows(x: Tensor, group_size: int) -> Tensor:
    """Return x [M, K] rounded as by quantize_rows, in its own dtype, which loses nothing more."""
    codes, scales = quantize_rows(x, group_size)
    widened = scales.repeat_interleave(group_size, dim=1)[:, : x.shape[1]]
    return (codes.float() * widened).to(x.dtype)


def with_rounded_rows(linear: Linear) -> Linear:
    """Return `linear` with inputs of FP8 weights rounded first."""

    @wraps(linear)
    def rounded(x: Tensor, packed: PackedLinear, out_dtype: torch.dtype | None = None) -> Tensor:
        if packed.format is WeightFormat.FP8:
            x = round_rows(x, packed.group_size)
        return linear(x, packed, out_dtype)

    return rounded
