"""Tables of rotary position embeddings."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from surestep_worker.configs.rope import Llama3Scaling, RopeConfig, YarnScaling


def rotary_table(rope: RopeConfig, head_dim: int, num_positions: int, device: str) -> Tensor:
    """f32[P, D]: the D/2 cosines of each position, then its D/2 sines."""
    exponents = torch.arange(0, head_dim, 2).float() / head_dim
    frequencies = 1.0 / rope.theta**exponents / rope.linear_factor
    if rope.llama3 is not None:
        frequencies = _stretch(frequencies, rope.llama3)
    if rope.divisors:
        frequencies /= torch.tensor(rope.divisors)
    if rope.longrope is not None:
        frequencies /= torch.tensor(rope.longrope.divisors(num_positions))
    if rope.yarn is not None:
        frequencies *= _yarn_factors(rope.yarn, rope.theta, head_dim)
    angles = torch.outer(torch.arange(num_positions).float(), frequencies)
    table = torch.cat((angles.cos(), angles.sin()), dim=-1)
    scaling = rope.yarn or rope.longrope
    return (table if scaling is None else table * scaling.attention_factor).to(device)


def unrotated(table: Tensor) -> Tensor:
    """Return a table f32[P, 2] as long as this one, which leaves queries and keys as they are.

    It turns the first pair of a head by nothing, so that kernels need no other case.
    """
    return table.new_tensor([1.0, 0.0]).repeat(len(table), 1)


def _stretch(frequencies: Tensor, scaling: Llama3Scaling) -> Tensor:
    """Divide long wavelengths by the factor, keep short ones, blend in between (Llama 3.1)."""
    turns = scaling.original_max_position * frequencies / (2 * math.pi)
    span = scaling.high_freq_factor - scaling.low_freq_factor
    keep = ((turns - scaling.low_freq_factor) / span).clamp(0.0, 1.0)
    return frequencies * (keep + (1.0 - keep) / scaling.factor)


def _yarn_factors(scaling: YarnScaling, theta: float, head_dim: int) -> Tensor:
    """Factors f32[D/2] of the frequencies: 1 for the fastest, 1 / factor for the slowest, and
    between the two borders what lies between, evenly."""

    def border(turns: float) -> float:
        """The index of the frequency that makes so many turns within the original positions."""
        wavelength = scaling.original_max_position / (turns * 2 * math.pi)
        return head_dim * math.log(wavelength) / (2 * math.log(theta))

    low, high = border(scaling.beta_fast), border(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = high - low if high != low else 1e-3
    ramp = ((torch.arange(head_dim // 2).float() - low) / width).clamp(0.0, 1.0)
    return (1.0 - ramp) + ramp / scaling.factor
