"""Configuration of Qwen3-Next and Qwen3.5: gated delta rule layers among gated attention layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from surestep_common.errors import InvalidRequest

from .config import (
    ModelConfig,
    architecture_of,
    lookup,
    read_eos_token_ids,
    read_json,
    read_rope,
    refuse_unserved,
    required,
)
from .quantization import read_quantization


class HybridTraits(NamedTuple):
    """Where the architectures of the family differ."""

    moe: bool
    grouped_projection: bool = False  # q, k, v and z of the delta rule lie together per key head
    prefix: str = "model."  # of the decoder's tensors
    nested: bool = False  # the decoder's configuration is `text_config`


HYBRID_ARCHITECTURES: Mapping[str, HybridTraits] = {
    "Qwen3NextForCausalLM": HybridTraits(moe=True, grouped_projection=True),
    "Qwen3_5ForCausalLM": HybridTraits(moe=False),
    "Qwen3_5MoeForCausalLM": HybridTraits(moe=True),
    "Qwen3_5ForConditionalGeneration": HybridTraits(
        moe=False, prefix="model.language_model.", nested=True
    ),
    "Qwen3_5MoeForConditionalGeneration": HybridTraits(
        moe=True, prefix="model.language_model.", nested=True
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaConfig:
    """Sizes of the gated delta rule layers."""

    num_k_heads: int
    num_v_heads: int
    k_dim: int
    v_dim: int
    taps: int  # of the convolution

    @property
    def channels(self) -> int:
        """Of the convolution: queries, keys and values."""
        return 2 * self.num_k_heads * self.k_dim + self.num_v_heads * self.v_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeConfig:
    """Sizes of routed feed-forward layers."""

    num_experts: int
    top_k: int
    expert_size: int
    shared_expert_size: int
    normalize: bool  # the weights of the chosen experts sum to 1


@dataclass(frozen=True, slots=True, kw_only=True)
class HybridConfig(ModelConfig):
    """Architecture of a hybrid decoder. Sizes are of the whole model, not of one rank."""

    traits: HybridTraits
    layer_types: tuple[str, ...]  # "linear_attention" or "full_attention"
    rotary_dim: int  # leading elements of each head that are rotated
    delta: DeltaConfig
    moe: MoeConfig | None
    dense_layers: frozenset[int]  # layers of a model with experts that have none

    @classmethod
    def from_pretrained(cls, path: Path) -> HybridConfig:
        """Read config.json and generation_config.json of a model folder.

        Raises InvalidRequest naming what is missing, unknown or not served.
        """
        whole = read_json(path / "config.json")
        architecture = architecture_of(whole)
        traits = lookup(architecture, HYBRID_ARCHITECTURES)
        raw = required(whole, "text_config") if traits.nested else whole
        refuse_unserved({**raw, "partial_rotary_factor": 1.0})
        rope = dict(raw.get("rope_parameters") or raw.get("rope_scaling") or {})
        factor = rope.pop("partial_rotary_factor", raw.get("partial_rotary_factor", 0.25))
        if raw.get("mtp_num_hidden_layers", raw.get("num_nextn_predict_layers", 1)) not in (0, 1):
            raise InvalidRequest("MTP heads of more than one layer are not served", param="model")
        return cls(
            architecture=architecture,
            traits=traits,
            vocab_size=required(raw, "vocab_size"),
            hidden_size=required(raw, "hidden_size"),
            intermediate_size=raw.get("intermediate_size") or 0,
            num_layers=required(raw, "num_hidden_layers"),
            num_heads=required(raw, "num_attention_heads"),
            num_kv_heads=required(raw, "num_key_value_heads"),
            head_dim=required(raw, "head_dim"),
            max_position=required(raw, "max_position_embeddings"),
            rms_norm_eps=required(raw, "rms_norm_eps"),
            rope=read_rope({**raw, "rope_parameters": rope}),
            rotary_dim=int(required(raw, "head_dim") * factor),
            sliding_window=None,
            qkv_bias=bool(raw.get("attention_bias", False)),
            o_bias=bool(raw.get("attention_bias", False)),
            mlp_bias=False,
            qk_norm=True,
            tie_word_embeddings=bool(whole.get("tie_word_embeddings", False)),
            eos_token_ids=read_eos_token_ids(path, raw),
            checkpoint_dtype=raw.get("dtype") or raw.get("torch_dtype") or "float32",
            quantization=read_quantization(whole),
            layer_types=_layer_types(raw),
            delta=_delta(raw),
            moe=_moe(raw) if traits.moe else None,
            dense_layers=_dense_layers(raw) if traits.moe else frozenset(),
        )

    def check_ranks(self, size: int) -> None:
        """Raise InvalidRequest when the model does not divide among `size` ranks."""
        sizes = {
            "linear key heads": self.delta.num_k_heads,
            "linear value heads": self.delta.num_v_heads,
            "heads": self.num_heads,
        }
        if self.moe is None or self.dense_layers:
            sizes["MLP columns"] = self.intermediate_size
        if self.moe is not None:
            sizes["columns of a shared expert"] = self.moe.shared_expert_size
        if size % self.num_kv_heads:  # else ranks share a head
            sizes["KV heads"] = self.num_kv_heads
        _require_even(sizes, size)

    def check_experts(self, size: int, *, whole: bool) -> None:
        """Raise InvalidRequest when `size` ranks cannot share out the experts, or their columns."""
        if self.moe is not None and whole:
            _require_even({"experts": self.moe.num_experts}, size)
        elif self.moe is not None:
            _require_even({"columns of an expert": self.moe.expert_size}, size)


def _require_even(sizes: Mapping[str, int], num_ranks: int) -> None:
    uneven = [f"{count} {name}" for name, count in sizes.items() if count % num_ranks]
    if uneven:
        raise InvalidRequest(
            f"tensor_parallel_size {num_ranks} does not divide {', '.join(uneven)}",
            param="tensor_parallel_size",
        )


def _layer_types(raw: Mapping[str, Any]) -> tuple[str, ...]:
    interval = raw.get("full_attention_interval", 4)
    count = required(raw, "num_hidden_layers")
    kinds = ("linear_attention", "full_attention")
    types = raw.get("layer_types") or [kinds[(i + 1) % interval == 0] for i in range(count)]
    unknown = set(types) - set(kinds)
    if unknown or len(types) != count:
        raise InvalidRequest(f"layer_types {sorted(unknown)} are not served", param="model")
    return tuple(types)


def _delta(raw: Mapping[str, Any]) -> DeltaConfig:
    delta = DeltaConfig(
        num_k_heads=required(raw, "linear_num_key_heads"),
        num_v_heads=required(raw, "linear_num_value_heads"),
        k_dim=required(raw, "linear_key_head_dim"),
        v_dim=required(raw, "linear_value_head_dim"),
        taps=required(raw, "linear_conv_kernel_dim"),
    )
    if delta.num_v_heads % delta.num_k_heads:
        raise InvalidRequest("linear value heads are no multiple of the key heads", param="model")
    return delta


def _moe(raw: Mapping[str, Any]) -> MoeConfig:
    return MoeConfig(
        num_experts=required(raw, "num_experts"),
        top_k=required(raw, "num_experts_per_tok"),
        expert_size=required(raw, "moe_intermediate_size"),
        shared_expert_size=required(raw, "shared_expert_intermediate_size"),
        normalize=bool(raw.get("norm_topk_prob", True)),
    )


def _dense_layers(raw: Mapping[str, Any]) -> frozenset[int]:
    step, named = raw.get("decoder_sparse_step", 1), raw.get("mlp_only_layers") or ()
    skipped = (i for i in range(required(raw, "num_hidden_layers")) if (i + 1) % step)
    return frozenset((*named, *skipped))
