"""Configuration of Llama, Mistral, Ministral, Qwen2, Qwen3, SmolLM3 and MiMo."""

from __future__ import annotations

import logging
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
    MtpTraits,
    architecture_of,
    lookup,
    read_dtype,
    read_eos_token_ids,
    read_layer_types,
    read_sizes,
    refuse_deep_heads,
    refuse_unserved,
)
from surestep_worker.configs.quantization import read_quantization
from surestep_worker.configs.rope import MAX_FACTOR, MAX_POSITION, read_rope, rope_parameters

logger = logging.getLogger(__name__)

_QUERY_SCALE = "llama_4_scaling_beta"


class Traits(NamedTuple):
    """Where an architecture differs from Llama. None: the config file decides."""

    qkv_bias: bool | None = None  # None: `attention_bias`, which also biases the output projection
    qk_norm: bool = False  # normalise each head of q and k before rotating
    window_switch: str | None = None  # key that must be true for `sliding_window` to count
    unrotated: bool = False  # `no_rope_layers`, or every few, know no positions
    scaled_queries: bool = False  # by their position, behind the original positions
    usual: Mapping[str, Any] = {}  # where the file does not say, as transformers' class has it
    mtp: MtpTraits = MtpTraits()  # if there is such a head


_MISTRAL: Mapping[str, Any] = {"num_key_value_heads": 8, "sliding_window": 4096}
_QWEN: Mapping[str, Any] = {"sliding_window": 4096}
MIMO_ARCHITECTURE = "MiMoForCausalLM"  # a Qwen2 with an MTP head
LLAMA_ARCHITECTURES: Mapping[str, Traits] = {
    "LlamaForCausalLM": Traits(window_switch="use_sliding_window"),
    "MistralForCausalLM": Traits(qkv_bias=False, usual=_MISTRAL),
    "MinistralForCausalLM": Traits(qkv_bias=False, usual=_MISTRAL),
    "Ministral3ForCausalLM": Traits(
        qkv_bias=False, scaled_queries=True, usual={"num_key_value_heads": 8, "head_dim": 128}
    ),
    "Qwen2ForCausalLM": Traits(qkv_bias=True, window_switch="use_sliding_window", usual=_QWEN),
    MIMO_ARCHITECTURE: Traits(
        qkv_bias=True,
        window_switch="use_sliding_window",
        usual=_QWEN,
        mtp=MtpTraits(blind_at_first=True, before_norm=True, hidden_first=True),
    ),
    "Qwen3ForCausalLM": Traits(
        qk_norm=True, window_switch="use_sliding_window", usual={**_QWEN, "head_dim": 128}
    ),
    "SmolLM3ForCausalLM": Traits(
        window_switch="use_sliding_window",
        unrotated=True,
        usual={"num_key_value_heads": 4, "rope_theta": 2e6, "tie_word_embeddings": True},
    ),
}
# The decoders alone, without an output head: what embedding models are saved as.
BACKBONES: Mapping[str, Traits] = {
    name.replace("ForCausalLM", "Model"): traits for name, traits in LLAMA_ARCHITECTURES.items()
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaConfig(ModelConfig):
    """Architecture of a decoder whose layers are alike, but for the windows of some."""

    @property
    def mtp(self) -> MtpTraits:
        """Traits of an MTP head."""
        return LLAMA_ARCHITECTURES.get(self.architecture, Traits()).mtp

    @classmethod
    def parse(cls, files: ConfigFiles) -> LlamaConfig:
        """Raises InvalidRequest naming what is missing, unknown, out of bounds or not served."""
        architecture = architecture_of(files.config)
        traits = lookup(architecture, {**LLAMA_ARCHITECTURES, **BACKBONES})
        raw = Fields(files.config).or_else(traits.usual)
        refuse_unserved(raw)
        if architecture == MIMO_ARCHITECTURE:
            refuse_deep_heads(raw, "num_nextn_predict_layers")
        attention_bias = raw.flag("attention_bias", default=False)
        sizes, window, rope = read_sizes(raw), _sliding_window(raw, traits), rope_parameters(raw)
        if traits.scaled_queries:
            sizes["max_position"] = _unscaled_positions(rope, sizes["max_position"])
        unrotated = (
            _unrotated_layers(raw, sizes["num_layers"]) if traits.unrotated else frozenset[int]()
        )
        return cls(
            architecture=architecture,
            **sizes,
            intermediate_size=raw.size("intermediate_size", MAX_WIDTH),
            rope=read_rope(raw, rope),
            sliding_window=window,
            qkv_bias=attention_bias if traits.qkv_bias is None else traits.qkv_bias,
            o_bias=attention_bias and traits.qkv_bias is None,
            mlp_bias=raw.flag("mlp_bias", default=False),
            qk_norm=traits.qk_norm,
            unrotated_layers=unrotated,
            attention_gate=False,
            zero_centred_norms=False,
            layer_types=_layer_types(raw, traits, sizes["num_layers"], window, unrotated),
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


def _unrotated_layers(raw: Fields, num_layers: int) -> frozenset[int]:
    """Read `no_rope_layers`, which has a 1 for each layer that rotates, else every fourth or so."""
    interval = raw.size("no_rope_layer_interval", MAX_LAYERS, default=4)
    rotates: tuple[int, ...] = tuple(int((i + 1) % interval > 0) for i in range(num_layers))
    if "no_rope_layers" in raw:
        rotates = raw.sizes("no_rope_layers", 1)
    if len(rotates) < num_layers:
        message = f"config.json: {len(rotates)} no_rope_layers for {num_layers} layers"
        raise InvalidRequest(message, param="model")
    return frozenset(i for i in range(num_layers) if not rotates[i])


def _unscaled_positions(rope: Fields, positions: int) -> int:
    """Return how many positions are served of a model that scales later queries: those before."""
    if not len(rope):
        raise InvalidRequest("config.json lacks rope_parameters", param="model")
    if not rope.number(_QUERY_SCALE, MAX_FACTOR, least=0.0, default=0.0):
        return positions
    original = rope.size("original_max_position_embeddings", MAX_POSITION, least=2)
    if positions > original:
        logger.info("%s is not served: %d positions are the most", _QUERY_SCALE, original)
    return min(positions, original)


def _layer_types(
    raw: Fields, traits: Traits, num_layers: int, window: int | None, unrotated: frozenset[int]
) -> tuple[str, ...]:
    """All layers of Mistral have the window unless the file lists some; where there is a switch,
    those without rotation, if there are any of that kind, or the last ones."""
    if window is None:
        if SLIDING_ATTENTION in raw.texts("layer_types"):
            switch = f"{traits.window_switch} true and " if traits.window_switch else ""
            raise InvalidRequest(
                f"config.json: layers of {SLIDING_ATTENTION}, without {switch}a sliding_window",
                param="model",
            )
        return (FULL_ATTENTION,) * num_layers
    if traits.unrotated:
        slides = unrotated
    elif traits.window_switch is None:
        slides = frozenset(range(num_layers))
    else:
        first = raw.size("max_window_layers", MAX_LAYERS, least=0, default=28)
        slides = frozenset(range(first, num_layers))
    kinds = (FULL_ATTENTION, SLIDING_ATTENTION)
    return read_layer_types(raw, [kinds[i in slides] for i in range(num_layers)])
