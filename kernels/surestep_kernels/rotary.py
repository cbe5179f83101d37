"""Rotary position embedding (Su et al., 2021), in the "neox" form: halves, not pairs."""

from __future__ import annotations

import torch
from torch import Tensor


def rotary_reference(q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor) -> None:
    """Rotate q [T, Hq, D] and k [T, Hkv, D] in place by their positions i64[T].

    cos_sin is f32[P, D']: row p holds the D'/2 cosines of position p, then its D'/2 sines. Of each
    head the first D' elements are rotated, the rest stays as it is.
    """
    cos, sin = cos_sin[positions].unsqueeze(1).chunk(2, dim=-1)  # [T, 1, D'/2] each
    for x in (q[..., : cos_sin.shape[1]], k[..., : cos_sin.shape[1]]):
        first, second = x.float().chunk(2, dim=-1)
        x.copy_(torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1))
