"""Norms: weights as the kernels take them."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from surestep_worker.models.prepared import Weights


def output_bound(factors: Tensor) -> float:
    """What no element that a norm with these factors [H] puts out exceeds in magnitude.

    A vector of root mean square 1 has none above sqrt(H); twice that leaves room for rounding.
    """
    return 2 * math.sqrt(len(factors)) * float(factors.abs().max())


def take_zero_centred(weights: Weights, name: str) -> Tensor:
    """Read a norm whose checkpoint holds the difference from 1; returns the factors, f32."""
    return weights.take(name, torch.float32, lambda difference: 1.0 + difference)
