"""Configuration of Phi-3, Phi-3.5-mini, Phi-4 and Phi-4-mini."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from surestep_common.errors import InvalidRequest

from surestep_worker.checkpoint.json_fields import Fields
from surestep_worker.checkpoint.model_folder import ConfigFiles
from surestep_worker.configs.model_config import (
    FULL_ATTENTION,
    MAX_WIDTH,
    SLIDING_ATTENTION,
    ModelConfig,
    architecture_of,
    read_dtype,
    read_eos_token_ids,
    read_sizes,
    refuse_unserved,
)
from surestep_worker.configs.quantization import read_quantization
from surestep_worker.configs.rope import (
    MAX_FACTOR,
    MAX_POSITION,
    LongRopeScaling,
    RopeConfig,
    read_rope,
    read_rotary_dim,
    rope_kind,
    rope_parameters,
)

_ORIGINAL, _PARTIAL = "original_max_position_embeddings", "partial_rotary_factor"
_USUAL = {_ORIGINAL: 4096}  # as transformers' class has it
_LONG = ("longrope", "su")  # two names of it


@dataclass(frozen=True, slots=True, kw_only=True)
class Phi3Config(ModelConfig):
    """Architecture of a Phi-3 decoder, whose files join the projections of one input."""

    @classmethod
    def parse(cls, files: ConfigFiles) -> Phi3Config:
        """Raises InvalidRequest naming what is missing, unknown, out of bounds or not served."""
        raw = Fields(files.config).or_else(_USUAL)
        refuse_unserved(raw.without(_PARTIAL))
        sizes, scaling = read_sizes(raw), rope_parameters(raw)
        rotary_dim = read_rotary_dim(raw, scaling, sizes["head_dim"], 1.0)
        window = raw.size("sliding_window", MAX_POSITION) if "sliding_window" in raw else None
        kind = FULL_ATTENTION if window is None else SLIDING_ATTENTION
        return cls(
            architecture=architecture_of(files.config),
            **sizes,
            intermediate_size=raw.size("intermediate_size", MAX_WIDTH),
            rope=_rope(raw, scaling, sizes, rotary_dim),
            sliding_window=window,
            qkv_bias=False,
            o_bias=False,
            mlp_bias=False,
            qk_norm=False,
            attention_gate=False,
            zero_centred_norms=False,
            layer_types=(kind,) * sizes["num_layers"],
            rotary_dim=rotary_dim,
            tie_word_embeddings=raw.flag("tie_word_embeddings", default=False),
            is_backbone=False,
            eos_token_ids=read_eos_token_ids(files, raw),
            checkpoint_dtype=read_dtype(raw),
            quantization=read_quantization(raw),
        )


def _rope(raw: Fields, scaling: Fields, sizes: dict[str, Any], rotary_dim: int) -> RopeConfig:
    plain, kind = scaling.without(_PARTIAL), rope_kind(scaling)
    if kind in _LONG:
        base = read_rope(raw, plain.without("rope_type").without("type"))
        return replace(base, longrope=_longrope(raw, scaling, sizes["max_position"], rotary_dim))
    if kind != "default":
        message = f"rope scaling '{kind}' of Phi-3 is not supported; supported: default, longrope"
        raise InvalidRequest(message, param="model")
    return read_rope(raw, plain)


def _longrope(raw: Fields, scaling: Fields, positions: int, rotary_dim: int) -> LongRopeScaling:
    """Read the divisors. The factor of cosines and sines is the file's, or sqrt(1 + ln s / ln o)
    for s times as many positions as the original o."""
    names = "short_factor", "long_factor"
    short, long = (scaling.numbers(name, MAX_FACTOR) for name in names)
    if {len(short), len(long)} != {rotary_dim // 2}:
        raise InvalidRequest(
            f"config.json: {len(short)} short_factor and {len(long)} long_factor for"
            f" {rotary_dim // 2} frequencies",
            param="model",
        )
    original = raw.size(_ORIGINAL, MAX_POSITION, least=2)
    stretch = scaling.number("factor", MAX_FACTOR, default=positions / original)
    usual = math.sqrt(1 + math.log(max(stretch, 1.0)) / math.log(original))
    return LongRopeScaling(
        short=short,
        long=long,
        original_max_position=original,
        attention_factor=scaling.number("attention_factor", MAX_FACTOR, default=usual),
    )
