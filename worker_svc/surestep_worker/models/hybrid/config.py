"""Configuration of Qwen3-Next and Qwen3.5: gated delta rule layers among gated attention layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from surestep_common.errors import InvalidRequest

from surestep_worker.cache.recurrent import RecurrentSpec
from surestep_worker.checkpoint.json_fields import Fields
from surestep_worker.checkpoint.model_folder import ConfigFiles
from surestep_worker.configs.layer_sizes import DeltaConfig, DeltaModelConfig, MoeConfig
from surestep_worker.configs.model_config import (
    FULL_ATTENTION,
    LINEAR_ATTENTION,
    MAX_HEADS,
    MAX_LAYERS,
    MAX_WIDTH,
    architecture_of,
    lookup,
    read_dense_layers,
    read_dtype,
    read_eos_token_ids,
    read_num_experts,
    read_sizes,
    refuse_deep_heads,
    refuse_unserved,
)
from surestep_worker.configs.quantization import read_quantization
from surestep_worker.configs.rope import read_rope, read_rotary_dim, rope_parameters

_MAX_TAPS = 8
_MAX_DELTA_DIM = 256  # of a key or value of the delta rule
_VECTOR = 8  # elements that kernels take at once
_MIXERS = (LINEAR_ATTENTION, FULL_ATTENTION)


class HybridTraits(NamedTuple):
    """Where the architectures of the family differ."""

    moe: bool
    kv_heads: int  # where the file does not say, as transformers' class has it
    grouped_projection: bool = False  # q, k, v and z of the delta rule lie together per key head
    prefix: str = "model."  # of the decoder's tensors
    nested: bool = False  # the decoder's configuration is `text_config`


HYBRID_ARCHITECTURES: Mapping[str, HybridTraits] = {
    "Qwen3NextForCausalLM": HybridTraits(moe=True, kv_heads=2, grouped_projection=True),
    "Qwen3_5ForCausalLM": HybridTraits(moe=False, kv_heads=4),
    "Qwen3_5MoeForCausalLM": HybridTraits(moe=True, kv_heads=2),
    "Qwen3_5ForConditionalGeneration": HybridTraits(
        moe=False, kv_heads=4, prefix="model.language_model.", nested=True
    ),
    "Qwen3_5MoeForConditionalGeneration": HybridTraits(
        moe=True, kv_heads=2, prefix="model.language_model.", nested=True
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class HybridConfig(DeltaModelConfig):
    """Architecture of a hybrid decoder. Sizes are of the whole model, not of one rank."""

    traits: HybridTraits

    @classmethod
    def parse(cls, files: ConfigFiles) -> HybridConfig:
        """Raises InvalidRequest naming what is missing, unknown, out of bounds or not served."""
        whole = Fields(files.config)
        architecture = architecture_of(files.config)
        traits = lookup(architecture, HYBRID_ARCHITECTURES)
        raw = _decoder(whole) if traits.nested else whole
        raw = raw.or_else(
            {"num_key_value_heads": traits.kv_heads, "head_dim": 256, "norm_topk_prob": True}
        )
        refuse_unserved(raw.without("partial_rotary_factor"))
        named = "mtp_num_hidden_layers"
        refuse_deep_heads(raw, named if named in raw else "num_nextn_predict_layers")
        raw.size("hidden_size", MAX_WIDTH, multiple=_VECTOR)
        rope = rope_parameters(raw)
        sizes = read_sizes(raw)
        bias = raw.flag("attention_bias", default=False)
        dense_layers = read_dense_layers(raw) if traits.moe else frozenset[int]()
        return cls(
            architecture=architecture,
            traits=traits,
            grouped_projection=traits.grouped_projection,
            **sizes,
            intermediate_size=_dense_size(raw, needed=bool(dense_layers) or not traits.moe),
            rope=read_rope(raw, rope.without("partial_rotary_factor")),
            rotary_dim=read_rotary_dim(raw, rope, sizes["head_dim"], 0.25),
            sliding_window=None,
            qkv_bias=bias,
            o_bias=bias,
            mlp_bias=False,
            qk_norm=True,
            attention_gate=True,
            zero_centred_norms=True,
            is_backbone=False,
            tie_word_embeddings=whole.flag("tie_word_embeddings", default=False),
            eos_token_ids=read_eos_token_ids(files, raw),
            checkpoint_dtype=read_dtype(raw),
            quantization=read_quantization(whole),
            layer_types=_layer_types(raw),
            delta=_delta(raw),
            moe=_moe(raw) if traits.moe else None,
            dense_layers=dense_layers,
        )

    def recurrent_spec(self, dtype: torch.dtype, ranks: int = 1) -> RecurrentSpec | None:
        """Return the contents of a rank's recurrent cache; None without linear attention."""
        delta, num_layers = self.delta, self.layer_types.count(LINEAR_ATTENTION)
        if not num_layers:
            return None
        return RecurrentSpec(
            num_layers=num_layers,
            num_k_heads=delta.num_k_heads // ranks,
            num_v_heads=delta.num_v_heads // ranks,
            k_dim=delta.k_dim,
            v_dim=delta.v_dim,
            taps=delta.taps,
            dtype=dtype,
        )

    def check_ranks(self, size: int, *, expert_parallel: bool = False) -> None:
        """Raise InvalidRequest when the model does not divide among `size` ranks, or into parts
        that the kernel of the attention's gate does not take."""
        DeltaModelConfig.check_ranks(self, size, expert_parallel=expert_parallel)
        heads = self.num_heads // size
        if heads * self.head_dim % _VECTOR:
            raise InvalidRequest(
                f"{heads} heads of {self.head_dim} elements on each rank are no multiple of"
                f" {_VECTOR} elements, which gated attention needs",
                param="model",
            )

    def sizes_to_share(self) -> dict[str, int]:
        """Return sizes that all ranks must share equally, by name."""
        return {
            "linear key heads": self.delta.num_k_heads,
            "linear value heads": self.delta.num_v_heads,
            **DeltaModelConfig.sizes_to_share(self),
        }


def _decoder(whole: Fields) -> Fields:
    """The configuration of the text part."""
    if "text_config" not in whole:
        raise InvalidRequest("config.json lacks text_config", param="model")
    return whole.object("text_config")


def _layer_types(raw: Fields) -> tuple[str, ...]:
    count = raw.size("num_hidden_layers", MAX_LAYERS)
    interval = raw.size("full_attention_interval", MAX_LAYERS, default=4)
    types = raw.texts("layer_types") or [_MIXERS[(i + 1) % interval == 0] for i in range(count)]
    unknown = set(types) - set(_MIXERS)
    if unknown or len(types) != count:
        raise InvalidRequest(
            f"{len(types)} layer_types for {count} layers, {sorted(unknown)} among them,"
            " are not served",
            param="model",
        )
    if FULL_ATTENTION not in types:
        raise InvalidRequest("a model without full_attention layers is not served", param="model")
    return tuple(types)


def _delta(raw: Fields) -> DeltaConfig:
    delta = DeltaConfig(
        num_k_heads=raw.size("linear_num_key_heads", MAX_HEADS),
        num_v_heads=raw.size("linear_num_value_heads", MAX_HEADS),
        k_dim=raw.size("linear_key_head_dim", _MAX_DELTA_DIM, multiple=_VECTOR),
        v_dim=raw.size("linear_value_head_dim", _MAX_DELTA_DIM, multiple=_VECTOR),
        taps=raw.size("linear_conv_kernel_dim", _MAX_TAPS),
    )
    if delta.num_v_heads % delta.num_k_heads:
        raise InvalidRequest("linear value heads are no multiple of the key heads", param="model")
    return delta


def _moe(raw: Fields) -> MoeConfig:
    experts = read_num_experts(raw, "num_experts")
    return MoeConfig(
        num_experts=experts,
        top_k=raw.size("num_experts_per_tok", experts),
        expert_size=raw.size("moe_intermediate_size", MAX_WIDTH),
        shared_expert_size=raw.size("shared_expert_intermediate_size", MAX_WIDTH),
        normalize=raw.flag("norm_topk_prob"),
    )


def _dense_size(raw: Fields, *, needed: bool) -> int:
    if needed:
        return raw.size("intermediate_size", MAX_WIDTH)
    return raw.size("intermediate_size", MAX_WIDTH, least=0, default=0)
