"""Norms: weights as the kernels take them."""

from __future__ import annotations

import torch
from torch import Tensor

from surestep_worker.models.prepared import Weights


def take_zero_centred(weights: Weights, name: str) -> Tensor:
    """Read a norm whose checkpoint holds the difference from 1; returns the factors, f32."""
    return weights.take(name, torch.float32, lambda difference: 1.0 + difference)
