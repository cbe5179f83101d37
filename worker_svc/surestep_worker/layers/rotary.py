"""Tables of rotary position embeddings."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from surestep_worker.configs.rope import Llama3Scaling, RopeConfig


def rotary_table(rope: RopeConfig, head_dim: int, num_positions: int, device: str) -> Tensor:
    """f32[P, D]: the D/2 cosines of each position, then its D/2 sines."""
    exponents = torch.arange(0, head_dim, 2).float() / head_dim
    frequencies = 1.0 / rope.theta**exponents / rope.linear_factor
    if rope.llama3 is not None:
        frequencies = _stretch(frequencies, rope.llama3)
    angles = torch.outer(torch.arange(num_positions).float(), frequencies)
    return torch.cat((angles.cos(), angles.sin()), dim=-1).to(device)


def _stretch(frequencies: Tensor, scaling: Llama3Scaling) -> Tensor:
    """Divide long wavelengths by the factor, keep short ones, blend in between (Llama 3.1)."""
    turns = scaling.original_max_position * frequencies / (2 * math.pi)
    span = scaling.high_freq_factor - scaling.low_freq_factor
    keep = ((turns - scaling.low_freq_factor) / span).clamp(0.0, 1.0)
    return frequencies * (keep + (1.0 - keep) / scaling.factor)
