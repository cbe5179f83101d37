"""Root-mean-square normalisation (Zhang and Sennrich, 2019), with and without a residual add."""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalise each row of x [T, H] and scale it by weight f32[H]; returns [T, H] in x's dtype.

    The row is rounded to x's dtype before the scale, as the published models were trained. x may be
    [T, heads, H] too, also as a slice of a projection: then each head is a row.
    """
    wide = x.float()
    inverse = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    return ((wide * inverse).to(x.dtype) * weight).to(x.dtype)


def add_rms_norm_reference(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Add x to residual in place (both [T, H]); return the normalised residual [T, H]."""
    residual += x
    return rms_norm_reference(residual, weight, eps)
