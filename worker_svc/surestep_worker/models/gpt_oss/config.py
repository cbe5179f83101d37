"""Configuration of gpt-oss: attention with sinks, in every other layer within a window; experts."""

from __future__ import annotations

from dataclasses import dataclass

from surestep_common.errors import InvalidRequest

from surestep_worker.checkpoint.json_fields import Fields
from surestep_worker.checkpoint.model_folder import ConfigFiles
from surestep_worker.configs.layer_sizes import RoutedConfig
from surestep_worker.configs.model_config import (
    FULL_ATTENTION,
    MAX_WIDTH,
    SLIDING_ATTENTION,
    architecture_of,
    read_dtype,
    read_eos_token_ids,
    read_layer_types,
    read_num_experts,
    read_sizes,
    read_window,
    refuse_unserved,
)
from surestep_worker.configs.quantization import read_quantization
from surestep_worker.configs.rope import read_rope, rope_parameters

_MAX_LIMIT = 1e6
_ALPHA = 1.702  # of clamped_swiglu
_USUAL = {
    "num_key_value_heads": 8,
    "head_dim": 64,
    "swiglu_limit": 7.0,
}  # as transformers' class has it


@dataclass(frozen=True, slots=True, kw_only=True)
class GptOssConfig(RoutedConfig):
    """Architecture of a gpt-oss decoder."""

    @classmethod
    def parse(cls, files: ConfigFiles) -> GptOssConfig:
        """Raises InvalidRequest naming what is missing, unknown, out of bounds or not served."""
        raw = Fields(files.config).or_else(_USUAL)
        refuse_unserved(raw)
        _refuse_other_activations(raw)
        sizes, bias = read_sizes(raw), raw.flag("attention_bias", default=True)
        layer_types = _layer_types(raw, sizes["num_layers"])
        experts = read_num_experts(raw, "num_local_experts")
        return cls(
            architecture=architecture_of(files.config),
            **sizes,
            intermediate_size=raw.size("intermediate_size", MAX_WIDTH),
            rope=read_rope(raw, _rope(raw)),
            sliding_window=read_window(raw, layer_types),
            qkv_bias=bias,
            o_bias=bias,
            mlp_bias=True,
            qk_norm=False,
            attention_sinks=True,
            attention_gate=False,
            zero_centred_norms=False,
            layer_types=layer_types,
            rotary_dim=sizes["head_dim"],
            tie_word_embeddings=raw.flag("tie_word_embeddings", default=False),
            is_backbone=False,
            eos_token_ids=read_eos_token_ids(files, raw),
            checkpoint_dtype=read_dtype(raw),
            quantization=read_quantization(raw),
            num_local_experts=experts,
            num_experts_per_tok=raw.size("num_experts_per_tok", experts),
            swiglu_limit=raw.number("swiglu_limit", _MAX_LIMIT),
        )


def _refuse_other_activations(raw: Fields) -> None:
    alpha = raw.number("swiglu_alpha", _MAX_LIMIT, default=_ALPHA)
    if alpha != _ALPHA:
        raise InvalidRequest(f"swiglu_alpha {alpha} is not supported", param="model")


def _rope(raw: Fields) -> Fields:
    """Must be there: what stands for it elsewhere is not what these models were trained with."""
    rope = rope_parameters(raw)
    if not len(rope):
        raise InvalidRequest("config.json lacks rope_scaling", param="model")
    if "rope_theta" not in rope and "rope_theta" not in raw:
        raise InvalidRequest("config.json lacks rope_theta", param="model")
    return rope


def _layer_types(raw: Fields, num_layers: int) -> tuple[str, ...]:
    """The first layer has a window unless the file says otherwise."""
    kinds = (SLIDING_ATTENTION, FULL_ATTENTION)
    return read_layer_types(raw, [kinds[i % 2] for i in range(num_layers)])
