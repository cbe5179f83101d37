"""Configuration of DeepSeek-V3, V3.2, GLM-5 and GLM-4.7-Flash (latent attention, dense or sparse),
and of GLM-4.5, which has ordinary attention and the same experts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from surestep_common.errors import InvalidRequest

from surestep_worker.cache.kv_cache import LatentWidths
from surestep_worker.checkpoint.json_fields import Fields
from surestep_worker.checkpoint.model_folder import ConfigFiles
from surestep_worker.configs.layer_sizes import (
    IndexerConfig,
    LatentConfig,
    LatentModelConfig,
    MoeConfig,
    SigmoidRouting,
)
from surestep_worker.configs.model_config import (
    FULL_ATTENTION,
    LATENT_ATTENTION,
    MAX_HEAD_DIM,
    MAX_LAYERS,
    MAX_WIDTH,
    MtpTraits,
    architecture_of,
    lookup,
    read_dtype,
    read_eos_token_ids,
    read_num_experts,
    read_sizes,
    refuse_deep_heads,
    refuse_unserved,
)
from surestep_worker.configs.quantization import read_quantization
from surestep_worker.configs.rope import (
    MAX_FACTOR,
    MAX_POSITION,
    read_rope,
    read_rotary_dim,
    rope_kind,
    rope_parameters,
)

_VECTOR = 8  # elements that kernels take at once
_MAX_LATENT, _MAX_KEY, _MAX_INDEX_HEADS = 1024, 256, 128  # of the kernels


class Traits(NamedTuple):
    """Where the architectures of the family differ."""

    latent: bool = True
    indexer: bool = False
    index_interleaved: bool = False  # pairs of an index key are rotated, not its halves
    usual: Mapping[str, Any] = {}  # where the file does not say, as transformers' class has it


_V3 = {
    "rope_interleave": True,
    "norm_topk_prob": True,
    "index_topk": 2048,
    "q_lora_rank": 1536,
    "n_group": 8,
    "topk_group": 4,
    "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 3,
    "index_n_heads": 64,
}
_GLM_5 = _V3 | {"q_lora_rank": 2048, "n_group": 1, "topk_group": 1, "index_n_heads": 32}
_GLM_LITE = _V3 | {
    "q_lora_rank": 768,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.8,
    "first_k_dense_replace": 1,
}
_GLM_4_5 = _GLM_LITE | {"num_key_value_heads": 8, "routed_scaling_factor": 1.0}
DEEPSEEK_ARCHITECTURES: Mapping[str, Traits] = {
    "DeepseekV3ForCausalLM": Traits(usual=_V3),
    "DeepseekV32ForCausalLM": Traits(indexer=True, usual=_V3),
    "GlmMoeDsaForCausalLM": Traits(indexer=True, index_interleaved=True, usual=_GLM_5),
    "Glm4MoeLiteForCausalLM": Traits(usual=_GLM_LITE),
    "Glm4MoeForCausalLM": Traits(latent=False, usual=_GLM_4_5),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepseekConfig(LatentModelConfig):
    """Architecture of a decoder of the family."""

    @classmethod
    def parse(cls, files: ConfigFiles) -> DeepseekConfig:
        """Raises InvalidRequest naming what is missing, unknown, out of bounds or not served."""
        architecture = architecture_of(files.config)
        traits = lookup(architecture, DEEPSEEK_ARCHITECTURES)
        raw = Fields(files.config).or_else(traits.usual)
        partial = "partial_rotary_factor"
        refuse_unserved(raw if traits.latent else raw.without(partial))
        raw.size("hidden_size", MAX_WIDTH, multiple=_VECTOR)
        refuse_deep_heads(raw, "num_nextn_predict_layers")
        sizes = read_sizes(_with_rotated_size(raw) if traits.latent else raw)
        rope = rope_parameters(raw)
        bias, layers = raw.flag("attention_bias", default=False), sizes["num_layers"]
        if traits.latent and bias:
            raise InvalidRequest(
                "attention_bias with latent attention is not served", param="model"
            )
        latent = _latent(raw, rope) if traits.latent else None
        return cls(
            architecture=architecture,
            **sizes,
            intermediate_size=raw.size("intermediate_size", MAX_WIDTH),
            rope=read_rope(raw, rope if traits.latent else rope.without(partial)),
            rotary_dim=_rotary_dim(raw, rope, sizes["head_dim"], latent),
            sliding_window=None,
            qkv_bias=bias,
            o_bias=False,
            mlp_bias=False,
            qk_norm=not traits.latent and raw.flag("use_qk_norm", default=False),
            attention_gate=False,
            zero_centred_norms=False,
            is_backbone=False,
            tie_word_embeddings=raw.flag("tie_word_embeddings", default=False),
            eos_token_ids=read_eos_token_ids(files, raw),
            checkpoint_dtype=read_dtype(raw),
            quantization=read_quantization(raw),
            layer_types=(LATENT_ATTENTION if traits.latent else FULL_ATTENTION,) * layers,
            moe=_moe(raw),
            dense_layers=_dense_layers(raw, layers),
            latent=latent,
            indexer=_indexer(raw, layers, traits) if traits.indexer else None,
        )

    @property
    def draft_layer_type(self) -> str:
        """Type of an MTP head's layer."""
        return self.layer_types[-1]

    @property
    def mtp(self) -> MtpTraits:
        """Traits of an MTP head."""
        return MtpTraits(blind_at_first=True)

    def has_indexer(self, layer: int) -> bool:
        """Return whether a layer chooses positions itself, as the MTP head's, the last, does."""
        return self.indexer is not None and (layer >= self.num_layers or self.indexer.full[layer])

    def latent_widths(self, num_layers: int) -> tuple[LatentWidths, ...]:
        """Return the widths that each layer, an MTP head's last, keeps of a token."""
        if self.latent is None:
            return ()
        width, index = self.latent.rank + self.latent.rope_dim, self.indexer
        own = [index.dim if index and self.has_indexer(i) else 0 for i in range(num_layers)]
        return tuple(LatentWidths(width, keys) for keys in own)


def _with_rotated_size(raw: Fields) -> Fields:
    """Return the fields with the only size of a head that all parts of latent attention share."""
    others = raw.without("head_dim").without("num_key_value_heads")
    return others.or_else({"head_dim": _rope_dim(raw)})


def _latent(raw: Fields, rope: Fields) -> LatentConfig:
    nope, turned = raw.size("qk_nope_head_dim", MAX_HEAD_DIM), _rope_dim(raw)
    rank = raw.size("kv_lora_rank", _MAX_LATENT - turned, multiple=_VECTOR)
    q_rank = raw.size("q_lora_rank", MAX_WIDTH) if "q_lora_rank" in raw else None
    return LatentConfig(
        q_rank=q_rank,
        rank=rank,
        nope_dim=nope,
        rope_dim=turned,
        v_dim=raw.size("v_head_dim", MAX_HEAD_DIM),
        interleaved=raw.flag("rope_interleave"),
        scale=(nope + turned) ** -0.5 * _mscale(rope) ** 2,
    )


def _rope_dim(raw: Fields) -> int:
    return raw.size("qk_rope_head_dim", MAX_HEAD_DIM, multiple=_VECTOR)


def _mscale(rope: Fields) -> float:
    """The factor by which YaRN sharpens both queries and keys."""
    mscale = rope.number("mscale_all_dim", MAX_FACTOR, least=0.0, default=0.0)
    if rope_kind(rope) == "default" or not mscale:
        return 1.0
    return 0.1 * mscale * math.log(max(rope.number("factor", MAX_FACTOR), 1.0)) + 1.0


def _rotary_dim(raw: Fields, rope: Fields, head_dim: int, latent: LatentConfig | None) -> int:
    if latent is not None:
        return latent.rope_dim
    return read_rotary_dim(raw, rope, head_dim, 0.5)


def _moe(raw: Fields) -> MoeConfig:
    experts = read_num_experts(raw, "n_routed_experts")
    groups = raw.size("n_group", experts, default=1)
    kept, top_k = (
        raw.size("topk_group", groups, default=1 if groups == 1 else None),
        raw.size("num_experts_per_tok", experts),
    )
    size = experts // groups
    if experts % groups or top_k > kept * size or (groups > 1 and size < 2):
        raise InvalidRequest(
            f"config.json: {top_k} of {experts} experts in {kept} of {groups} groups", param="model"
        )
    method = raw.text("topk_method", "noaux_tc")
    if raw.text("scoring_func", "sigmoid") != "sigmoid" or method != "noaux_tc":
        raise InvalidRequest(
            "experts that are not chosen by sigmoid scores are not served", param="model"
        )
    expert_size = raw.size("moe_intermediate_size", MAX_WIDTH)
    return MoeConfig(
        num_experts=experts,
        top_k=top_k,
        expert_size=expert_size,
        shared_expert_size=expert_size * raw.size("n_shared_experts", experts, default=1),
        normalize=raw.flag("norm_topk_prob"),
        sigmoid=SigmoidRouting(
            groups=groups,
            kept_groups=kept,
            scale=raw.number("routed_scaling_factor", MAX_FACTOR),
        ),
    )


def _dense_layers(raw: Fields, layers: int) -> frozenset[int]:
    if "mlp_layer_types" in raw:
        kinds = raw.texts("mlp_layer_types")
        if len(kinds) != layers or set(kinds) - {"dense", "sparse"}:
            raise InvalidRequest(f"config.json: mlp_layer_types {list(kinds)}", param="model")
        return frozenset(i for i, kind in enumerate(kinds) if kind == "dense")
    if raw.size("moe_layer_freq", MAX_LAYERS, default=1) != 1:
        raise InvalidRequest("moe_layer_freq other than 1 is not served", param="model")
    first = raw.size("first_k_dense_replace", MAX_LAYERS, least=0)
    return frozenset(range(min(first, layers)))


def _indexer(raw: Fields, layers: int, traits: Traits) -> IndexerConfig:
    usual = traits.index_interleaved
    if "q_lora_rank" not in raw:
        raise InvalidRequest("an indexer without q_lora_rank is not served", param="model")
    dim = raw.size("index_head_dim", _MAX_KEY, multiple=_VECTOR, default=128)
    if dim < _rope_dim(raw):
        raise InvalidRequest(f"config.json: index_head_dim {dim} is too small", param="model")
    return IndexerConfig(
        heads=raw.size("index_n_heads", _MAX_INDEX_HEADS),
        dim=dim,
        top_k=raw.size("index_topk", MAX_POSITION),
        interleaved=raw.flag("indexer_rope_interleave", default=usual),
        full=_full_layers(raw, layers),
    )


def _full_layers(raw: Fields, layers: int) -> tuple[bool, ...]:
    """Listed, or a pattern of F and S, or every `index_topk_freq`-th from an offset on."""
    kinds: tuple[str, ...] = raw.texts("indexer_types") if "indexer_types" in raw else ()
    if not kinds and "index_topk_pattern" in raw:
        letters = {"F": "full", "S": "shared"}
        kinds = tuple(letters.get(c, c) for c in raw.text("index_topk_pattern"))
    if not kinds:
        step = raw.size("index_topk_freq", MAX_LAYERS, default=1)
        offset = raw.size("index_skip_topk_offset", MAX_LAYERS, least=0, default=2)
        names = "full", "shared"
        kinds = tuple(names[max(i - offset + 1, 0) % step > 0] for i in range(layers))
    if len(kinds) != layers or set(kinds) - {"full", "shared"} or kinds[0] != "full":
        raise InvalidRequest(f"config.json: indexer_types {list(kinds)}", param="model")
    return tuple(kind == "full" for kind in kinds)
