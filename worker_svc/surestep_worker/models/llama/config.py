"""Configuration of Llama, Mistral, Qwen2 and Qwen3."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from surestep_common.errors import InvalidRequest

from surestep_worker.checkpoint.json_fields import Fields
from surestep_worker.checkpoint.model_folder import ConfigFiles
from surestep_worker.configs.model_config import (
    FULL_ATTENTION,
    MAX_LAYERS,
    MAX_WIDTH,
    SLIDING_ATTENTION,
    ModelConfig,
    architecture_of,
    lookup,
    read_dtype,
    read_eos_token_ids,
    read_layer_types,
    read_sizes,
    refuse_unserved,
)
from surestep_worker.configs.quantization import read_quantization
from surestep_worker.configs.rope import MAX_POSITION, read_rope, rope_parameters


class Traits(NamedTuple):
    """Where an architecture differs from Llama. None: the config file decides."""

    qkv_bias: bool | None = None  # None: `attention_bias`, which also biases the output projection
    qk_norm: bool = False  # normalise each head of q and k before rotating
    window_switch: str | None = None  # key that must be true for `sliding_window` to count
    usual: Mapping[str, Any] = {}  # where the file does not say, as transformers' class has it


_QWEN: Mapping[str, Any] = {"sliding_window": 4096}
LLAMA_ARCHITECTURES: Mapping[str, Traits] = {
    "LlamaForCausalLM": Traits(window_switch="use_sliding_window"),
    "MistralForCausalLM": Traits(
        qkv_bias=False, usual={"num_key_value_heads": 8, "sliding_window": 4096}
    ),
    "Qwen2ForCausalLM": Traits(qkv_bias=True, window_switch="use_sliding_window", usual=_QWEN),
    "Qwen3ForCausalLM": Traits(
        qk_norm=True, window_switch="use_sliding_window", usual={**_QWEN, "head_dim": 128}
    ),
}
# The decoders alone, without an output head: what embedding models are saved as.
BACKBONES: Mapping[str, Traits] = {
    name.replace("ForCausalLM", "Model"): traits for name, traits in LLAMA_ARCHITECTURES.items()
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaConfig(ModelConfig):
    """Architecture of a decoder whose layers are alike, but for the windows of some."""

    @classmethod
    def parse(cls, files: ConfigFiles) -> LlamaConfig:
        """Raises InvalidRequest naming what is missing, unknown, out of bounds or not served."""
        architecture = architecture_of(files.config)
        traits = lookup(architecture, {**LLAMA_ARCHITECTURES, **BACKBONES})
        raw = Fields(files.config).or_else(traits.usual)
        refuse_unserved(raw)
        attention_bias = raw.flag("attention_bias", default=False)
        sizes, window = read_sizes(raw), _sliding_window(raw, traits)
        return cls(
            architecture=architecture,
            **sizes,
            intermediate_size=raw.size("intermediate_size", MAX_WIDTH),
            rope=read_rope(raw, rope_parameters(raw)),
            sliding_window=window,
            qkv_bias=attention_bias if traits.qkv_bias is None else traits.qkv_bias,
            o_bias=attention_bias and traits.qkv_bias is None,
            mlp_bias=raw.flag("mlp_bias", default=False),
            qk_norm=traits.qk_norm,
            attention_gate=False,
            zero_centred_norms=False,
            layer_types=_layer_types(raw, traits, sizes["num_layers"], window),
            rotary_dim=sizes["head_dim"],
            tie_word_embeddings=raw.flag("tie_word_embeddings", default=False),
            is_backbone=architecture in BACKBONES,
            eos_token_ids=read_eos_token_ids(files, raw),
            checkpoint_dtype=read_dtype(raw),
            quantization=read_quantization(raw),
        )


def _sliding_window(raw: Fields, traits: Traits) -> int | None:
    if "sliding_window" not in raw:
        return None
    if traits.window_switch is not None and not raw.flag(traits.window_switch, default=False):
        return None
    return raw.size("sliding_window", MAX_POSITION)


def _layer_types(
    raw: Fields, traits: Traits, num_layers: int, window: int | None
) -> tuple[str, ...]:
    """All layers of Mistral have the window; where there is a switch, the last ones."""
    if window is None:
        if traits.window_switch is not None and SLIDING_ATTENTION in raw.texts("layer_types"):
            raise InvalidRequest(
                f"config.json: layers of {SLIDING_ATTENTION}, without {traits.window_switch} true"
                " and a sliding_window",
                param="model",
            )
        return (FULL_ATTENTION,) * num_layers
    if traits.window_switch is None:
        return (SLIDING_ATTENTION,) * num_layers
    whole = min(raw.size("max_window_layers", MAX_LAYERS, least=0, default=28), num_layers)
    usual = (FULL_ATTENTION,) * whole + (SLIDING_ATTENTION,) * (num_layers - whole)
    return read_layer_types(raw, usual)
