"""Rotary position embeddings as a checkpoint describes them."""

from __future__ import annotations

import math
from dataclasses import dataclass

from surestep_common.errors import InvalidRequest

from surestep_worker.checkpoint.json_fields import Fields

MAX_POSITION = 1 << 24  # tokens
MAX_FACTOR = 1e6
_MAX_THETA = 1e15


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
class LongRopeScaling:
    """LongRoPE (Ding et al., 2024): a divisor of each frequency, for short sequences and for long.

    A sequence keeps one table for its life, so the served length chooses, as in vLLM: a server
    whose sequences may exceed the original positions uses the long divisors for all of them.
    """

    short: tuple[float, ...]
    long: tuple[float, ...]
    original_max_position: int
    attention_factor: float  # of cosines and sines

    def divisors(self, num_positions: int) -> tuple[float, ...]:
        """Return the divisors of a server with so many positions."""
        return self.long if num_positions > self.original_max_position else self.short


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Base frequency and its scaling; `linear_factor` 1 and None mean none."""

    theta: float
    linear_factor: float = 1.0
    llama3: Llama3Scaling | None = None
    yarn: YarnScaling | None = None
    longrope: LongRopeScaling | None = None
    divisors: tuple[float, ...] = ()  # of each frequency by itself; empty: 1


def read_rope(raw: Fields, scaling: Fields) -> RopeConfig:
    """From `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (before)."""
    theta = scaling.number(
        "rope_theta", _MAX_THETA, default=raw.number("rope_theta", _MAX_THETA, default=10_000.0)
    )
    kind = rope_kind(scaling)
    if scaling.number("partial_rotary_factor", 1.0, default=1.0) != 1.0:
        raise InvalidRequest("partial rotary embeddings are not supported", param="model")
    if kind == "default":
        return RopeConfig(theta=theta)
    if kind == "linear":
        return RopeConfig(theta=theta, linear_factor=scaling.number("factor", MAX_FACTOR))
    if kind == "llama3":
        return RopeConfig(theta=theta, llama3=_llama3(scaling))
    if kind == "divided":  # of a GGUF file, which holds what the scaling of Llama 3 comes to
        return RopeConfig(theta=theta, divisors=scaling.numbers("divisors", MAX_FACTOR))
    if kind == "yarn":
        if theta <= 1.0:
            raise InvalidRequest("rope scaling yarn: rope_theta must be above 1", param="model")
        return RopeConfig(theta=theta, yarn=_yarn(scaling))
    raise InvalidRequest(
        f"rope scaling '{kind}' is not supported; supported: default, linear, llama3, yarn",
        param="model",
    )


def read_layer_ropes(raw: Fields, *, theta: float, local_theta: float) -> list[RopeConfig]:
    """Return the ropes of layers without a window and of those with one, from `rope_parameters` of
    each kind (transformers 5), or `rope_theta`, `rope_scaling`, `rope_local_base_freq` (before).

    The thetas are usual ones. A scaling without a kind is of layers without a window.
    """
    by_kind = raw.object("rope_parameters")
    if len(by_kind) and not ("full_attention" in by_kind or "sliding_attention" in by_kind):
        raise InvalidRequest(
            "config.json: rope_parameters must name full_attention and sliding_attention",
            param="model",
        )
    whole = by_kind.object("full_attention") if len(by_kind) else raw.object("rope_scaling")
    kinds = (
        (whole, "rope_theta", theta),
        (by_kind.object("sliding_attention"), "rope_local_base_freq", local_theta),
    )
    ropes = []
    for scaling, key, usual in kinds:
        of_file = raw.or_else({key: usual}).number(key, _MAX_THETA)
        scaling = scaling.or_else({"rope_theta": of_file})
        scaling.number("rope_theta", _MAX_THETA)  # raises for null
        ropes.append(read_rope(raw, scaling))
    return ropes


def _llama3(scaling: Fields) -> Llama3Scaling:
    llama3 = Llama3Scaling(
        factor=scaling.number("factor", MAX_FACTOR),
        low_freq_factor=scaling.number("low_freq_factor", MAX_FACTOR),
        high_freq_factor=scaling.number("high_freq_factor", MAX_FACTOR),
        original_max_position=scaling.size("original_max_position_embeddings", MAX_POSITION),
    )
    if llama3.high_freq_factor <= llama3.low_freq_factor:
        raise InvalidRequest(
            "rope scaling llama3: high_freq_factor must exceed low_freq_factor", param="model"
        )
    return llama3


def _yarn(scaling: Fields) -> YarnScaling:
    factor = scaling.number("factor", MAX_FACTOR)
    usual = _attention_factor(scaling, factor)
    yarn = YarnScaling(
        factor=factor,
        original_max_position=scaling.size("original_max_position_embeddings", MAX_POSITION),
        beta_fast=scaling.number("beta_fast", MAX_FACTOR, default=32.0),
        beta_slow=scaling.number("beta_slow", MAX_FACTOR, default=1.0),
        truncate=scaling.flag("truncate", default=True),
        attention_factor=scaling.number("attention_factor", MAX_FACTOR, default=usual),
    )
    if yarn.beta_fast < yarn.beta_slow:
        raise InvalidRequest(
            "rope scaling yarn: beta_fast must not be less than beta_slow", param="model"
        )
    return yarn


def _attention_factor(scaling: Fields, factor: float) -> float:
    """Return the factor of cosines and sines. With DeepSeek's `mscale_all_dim` scores are scaled
    too, see configs/deepseek.py."""

    def sharpened(mscale: float) -> float:
        return 0.1 * mscale * math.log(max(factor, 1.0)) + 1.0

    names = "mscale", "mscale_all_dim"
    mscale, of_all = (scaling.number(name, MAX_FACTOR, least=0.0, default=0.0) for name in names)
    return sharpened(mscale) / sharpened(of_all) if mscale and of_all else sharpened(1.0)


def rope_kind(scaling: Fields) -> str:
    """Return the name of the scaling."""
    return scaling.or_else({"rope_type": scaling.text("type", "default")}).text("rope_type")


def read_rotary_dim(raw: Fields, scaling: Fields, head_dim: int, usual: float) -> int:
    """Return the number of rotated elements of a head: a part of `usual` if the file is silent."""
    named = "partial_rotary_factor"
    factor = scaling.or_else({named: raw.number(named, 1.0, default=usual)}).number(named, 1.0)
    dim = int(head_dim * factor)
    if dim < 2 or dim % 2:
        raise InvalidRequest(
            f"config.json: {dim} of {head_dim} elements of a head cannot be rotated", param="model"
        )
    return dim


def rope_parameters(raw: Fields) -> Fields:
    """Where a checkpoint describes its rotary embeddings; empty without such an object."""
    return raw.object("rope_parameters" if "rope_parameters" in raw else "rope_scaling")
