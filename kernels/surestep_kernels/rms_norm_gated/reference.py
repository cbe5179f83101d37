"""The norm behind a gated delta layer: each head is normalised, then gated."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from surestep_kernels.rms_norm import rms_norm_reference


def rms_norm_gated_reference(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return rms_norm(x) * weight * silu(gate) [T, H, D] of x and gate [T, H, D], weight f32[D]."""
    normed = rms_norm_reference(x.flatten(0, 1), weight, eps).view(x.shape)
    return (normed.float() * functional.silu(gate.float())).to(x.dtype)
