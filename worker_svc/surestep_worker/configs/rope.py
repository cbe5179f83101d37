"""Rotary position embeddings as a checkpoint describes them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Llama3Scaling:
    """Llama 3.1's stretch of the low frequencies."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int


@dataclass(frozen=True, slots=True, kw_only=True)
class YarnScaling:
    """YaRN (Peng et al., 2023): long wavelengths are stretched, short ones are not."""

    factor: float
    original_max_position: int
    beta_fast: float  # turns within the original positions from which a frequency is kept
    beta_slow: float  # turns up to which it is divided by the factor
    truncate: bool  # the frequencies where these borders lie are rounded to whole ones
    attention_factor: float  # of cosines and sines


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Base frequency and its scaling; `linear_factor` 1 and None mean none."""

    theta: float
    linear_factor: float = 1.0
    llama3: Llama3Scaling | None = None
    yarn: YarnScaling | None = None
    divisors: tuple[float, ...] = ()  # of each frequency by itself; empty: 1
