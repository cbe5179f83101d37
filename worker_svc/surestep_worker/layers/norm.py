"""Norms: weights as the kernels take them, and heads normalised one by one."""

from __future__ import annotations

import torch
from surestep_kernels import KernelSet
from torch import Tensor

from surestep_worker.models.prepared import Weights


def take_zero_centred(weights: Weights, name: str) -> Tensor:
    """Read a norm whose checkpoint holds the difference from 1; returns the factors, f32."""
    return weights.take(name, torch.float32, lambda difference: 1.0 + difference)


def norm_heads(x: Tensor, weight: Tensor, eps: float, kernels: KernelSet) -> Tensor:
    """Normalise each head of x [T, H, D], which may be a slice of a projection."""
    flat = x.reshape(-1, x.shape[-1]).contiguous()  # a single head may stay a slice
    return kernels.rms_norm(flat, weight, eps).view(x.shape)
