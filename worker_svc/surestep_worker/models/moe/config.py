"""Configuration of Qwen2-MoE, Qwen3-MoE and Mixtral: ordinary attention and routed experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from surestep_common.errors import InvalidRequest

from surestep_worker.checkpoint.json_fields import Fields
from surestep_worker.checkpoint.model_folder import ConfigFiles
from surestep_worker.configs.layer_sizes import MoeConfig, SparseConfig
from surestep_worker.configs.model_config import (
    FULL_ATTENTION,
    MAX_LAYERS,
    MAX_WIDTH,
    SLIDING_ATTENTION,
    architecture_of,
    lookup,
    read_dense_layers,
    read_dtype,
    read_eos_token_ids,
    read_layer_types,
    read_num_experts,
    read_sizes,
    refuse_unserved,
)
from surestep_worker.configs.quantization import read_quantization
from surestep_worker.configs.rope import MAX_POSITION, read_rope, rope_parameters


class Traits(NamedTuple):
    """Where the architectures of the family differ."""

    bias: str | None = None  # key: queries, keys and values have one
    o_bias: bool = False  # the output projection then has one, too
    qk_norm: bool = False  # normalise each head of q and k before rotating
    switched: bool = True  # `sliding_window` counts if `use_sliding_window` is true
    alternating: bool = False  # and then in every other of the first layers alone
    expert_size: str = "moe_intermediate_size"  # key
    shared: bool = False  # there is a shared expert, with a gate
    projections: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")  # of an expert
    usual: Mapping[str, Any] = {}  # where the file does not say, as transformers' class has it


_QWEN: Mapping[str, Any] = {"sliding_window": 4096, "use_sliding_window": False}
MOE_ARCHITECTURES: Mapping[str, Traits] = {
    "Qwen2MoeForCausalLM": Traits(
        bias="qkv_bias",
        alternating=True,
        shared=True,
        usual={**_QWEN, "num_key_value_heads": 16, "qkv_bias": True},
    ),
    "Qwen3MoeForCausalLM": Traits(
        bias="attention_bias",
        o_bias=True,
        qk_norm=True,
        usual={**_QWEN, "num_key_value_heads": 4},
    ),
    "MixtralForCausalLM": Traits(
        switched=False,
        expert_size="intermediate_size",
        projections=("w1", "w3", "w2"),
        usual={"num_key_value_heads": 8, "rope_theta": 1e6, "num_experts_per_tok": 2},
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutedDecoderConfig(SparseConfig):
    """Architecture of a decoder of the family."""

    @classmethod
    def parse(cls, files: ConfigFiles) -> RoutedDecoderConfig:
        """Raises InvalidRequest naming what is missing, unknown, out of bounds or not served."""
        architecture = architecture_of(files.config)
        traits = lookup(architecture, MOE_ARCHITECTURES)
        raw = Fields(files.config).or_else(traits.usual)
        refuse_unserved(raw)
        sizes, window = read_sizes(raw), _sliding_window(raw, traits)
        bias = traits.bias is not None and raw.flag(traits.bias, default=False)
        return cls(
            architecture=architecture,
            **sizes,
            intermediate_size=raw.size("intermediate_size", MAX_WIDTH),
            rope=read_rope(raw, rope_parameters(raw)),
            sliding_window=window,
            qkv_bias=bias,
            o_bias=bias and traits.o_bias,
            mlp_bias=False,
            qk_norm=traits.qk_norm,
            attention_gate=False,
            zero_centred_norms=False,
            layer_types=_layer_types(raw, traits, sizes["num_layers"], window),
            rotary_dim=sizes["head_dim"],
            tie_word_embeddings=raw.flag("tie_word_embeddings", default=False),
            is_backbone=False,
            eos_token_ids=read_eos_token_ids(files, raw),
            checkpoint_dtype=read_dtype(raw),
            quantization=read_quantization(raw),
            moe=_moe(raw, traits),
            dense_layers=read_dense_layers(raw),
        )


def _moe(raw: Fields, traits: Traits) -> MoeConfig:
    """Read the sizes of experts. Mixtral's weights always sum to 1."""
    named = "num_local_experts"
    experts = read_num_experts(raw, named if named in raw else "num_experts")
    shared = "shared_expert_intermediate_size"
    return MoeConfig(
        num_experts=experts,
        top_k=raw.size("num_experts_per_tok", experts),
        expert_size=raw.size(traits.expert_size, MAX_WIDTH),
        shared_expert_size=raw.size(shared, MAX_WIDTH) if traits.shared else 0,
        normalize=not traits.switched or raw.flag("norm_topk_prob", default=False),
        projections=traits.projections,
    )


def _sliding_window(raw: Fields, traits: Traits) -> int | None:
    if traits.switched and not raw.flag("use_sliding_window"):
        return None
    return raw.size("sliding_window", MAX_POSITION) if "sliding_window" in raw else None


def _layer_types(
    raw: Fields, traits: Traits, num_layers: int, window: int | None
) -> tuple[str, ...]:
    kinds = (FULL_ATTENTION, SLIDING_ATTENTION)
    if not traits.alternating:
        return (kinds[window is not None],) * num_layers
    most = raw.size("max_window_layers", MAX_LAYERS, least=0, default=28) if window else 0
    types = read_layer_types(raw, [kinds[i % 2 == 0 and i < most] for i in range(num_layers)])
    if window is None and SLIDING_ATTENTION in types:
        raise InvalidRequest(
            f"config.json: layers of {SLIDING_ATTENTION}, without use_sliding_window true and a"
            " sliding_window",
            param="model",
        )
    return types
