"""Norms: weights as the kernels take them."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from surestep_worker.configs.model_config import ModelConfig

from .context import LayerContext


def output_bound(factors: Tensor) -> float:
    """Return what no element that a norm with these factors [H] puts out exceeds in magnitude.

    A vector of root mean square 1 has none above sqrt(H); twice that leaves room for rounding.
    """
    return 2 * math.sqrt(len(factors)) * float(factors.abs().max())


def take_norm(context: LayerContext[ModelConfig], name: str) -> Tensor:
    """Read the factors f32[H] of a norm, of which some checkpoints hold the difference from 1."""
    weights = context.weights
    if context.config.zero_centred_norms:
        return weights.take(name, torch.float32, lambda difference: 1.0 + difference)
    return weights.take(name, torch.float32)
