"""Configuration of a model that transformers' own code computes, from a trace of its pass."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from surestep_common.errors import InvalidRequest
from surestep_kernels.paged_attention.cpu import MAX_GROUP
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from surestep_worker.checkpoint.json_fields import Fields
from surestep_worker.checkpoint.model_folder import ConfigFiles
from surestep_worker.configs.model_config import (
    FULL_ATTENTION,
    MAX_LAYERS,
    MAX_VOCAB,
    MAX_WIDTH,
    SLIDING_ATTENTION,
    ModelConfig,
    architecture_of,
    read_dtype,
    read_eos_token_ids,
)
from surestep_worker.configs.quantization import read_quantization
from surestep_worker.configs.rope import MAX_POSITION, RopeConfig

from .attention import ALIBI_POSITIONS, AttentionFacts
from .experts import expert_modules, sizes_of
from .matrix import Use
from .skeleton import Skeleton, trace

_WITH_OTHER_PARTS = "ForConditionalGeneration"  # end of the name: beside the decoder of text
CAUSAL = frozenset(
    name
    for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
    if not name.endswith(_WITH_OTHER_PARTS)
)
_ALIBI_LENGTH = 2048  # tokens that Bloom was trained with, whose configuration does not tell it
CHUNKED_ATTENTION = "chunked_attention"
_LENGTHS = "max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "n_ctx"


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformersConfig(ModelConfig):
    """Architecture as transformers' modules showed it."""

    library: Any  # transformers' own configuration
    causal: str  # class of its decoder: the architecture, or the text of one that has other parts
    attention: tuple[AttentionFacts, ...]  # calls in their order
    matrices: Mapping[str, Use]  # weights that are multiplied, by name
    siblings: tuple[tuple[str, ...], ...]  # names of those that one tensor is multiplied by
    expert_sizes: frozenset[tuple[int, int]]  # experts, and columns of each
    curves: bool  # the pass computes exponentials and their kin outside of activations

    @classmethod
    def parse(cls, files: ConfigFiles) -> TransformersConfig:
        """Raises InvalidRequest naming the reason for a model that is not served."""
        architecture, raw = architecture_of(files.config), Fields(files.config)
        library, causal = _library_config(architecture, files.config)
        text = _text_fields(library)
        num_layers = text.size("num_hidden_layers", MAX_LAYERS)
        skeleton = Skeleton(library, causal, torch.bfloat16)
        seen = trace(skeleton)
        layers = _checked(architecture, seen.attention, num_layers)
        num_heads, num_kv_heads = _heads_of_cache(layers)
        windows = {layer.window for layer in layers} - {0}
        hidden = text.size("hidden_size", MAX_WIDTH)
        return cls(
            architecture=architecture,
            vocab_size=text.size("vocab_size", MAX_VOCAB),
            hidden_size=hidden,
            intermediate_size=hidden,
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=max(layer.head_dim for layer in layers),
            max_position=_max_position(text, layers),
            rms_norm_eps=0.0,
            rope=RopeConfig(theta=1.0),
            sliding_window=min(windows, default=None),
            qkv_bias=False,
            o_bias=False,
            mlp_bias=False,
            qk_norm=False,
            attention_sinks=any(layer.sinks for layer in layers),
            attention_softcap=max(layer.softcap for layer in layers),
            attention_gate=False,
            zero_centred_norms=False,
            layer_types=tuple(
                SLIDING_ATTENTION if layer.window else FULL_ATTENTION for layer in layers
            ),
            rotary_dim=2,
            tie_word_embeddings=skeleton.tied,
            is_backbone=False,
            eos_token_ids=read_eos_token_ids(files, text),
            checkpoint_dtype=read_dtype(raw),
            quantization=read_quantization(raw),
            library=library,
            causal=causal,
            attention=layers,
            siblings=seen.siblings,
            expert_sizes=frozenset(map(sizes_of, expert_modules(skeleton.model).values())),
            curves=seen.curves,
            matrices={
                name: use for name, use in seen.uses.items() if use.multiplied and not use.otherwise
            },
        )

    @property
    def of_text(self) -> bool:
        """Return whether the checkpoint has other parts, which are left out."""
        return self.causal != self.architecture

    @property
    def keeping(self) -> tuple[AttentionFacts, ...]:
        """Calls that keep keys and values, each in a layer of the cache."""
        return tuple(call for i, call in enumerate(self.attention) if call.reads == i)

    def check_ranks(self, size: int, *, expert_parallel: bool = False) -> None:
        """Raise InvalidRequest when heads or experts do not divide among `size` ranks."""
        uneven = [f"{it.num_heads} heads" for it in self.attention if it.num_heads % size]
        if self.num_kv_heads % size and size % self.num_kv_heads:
            uneven.append(f"{self.num_kv_heads} KV heads")
        for count, inner in self.expert_sizes:
            if expert_parallel and count % size:
                uneven.append(f"{count} experts")
            elif inner % size and not expert_parallel:
                uneven.append(f"{inner} columns of experts")
        if uneven:
            raise InvalidRequest(
                f"tensor_parallel_size {size} does not divide {' and '.join(dict.fromkeys(uneven))}"
                f" of {self.architecture}",
                param="tensor_parallel_size",
            )


def _library_config(architecture: str, config: Mapping[str, Any]) -> tuple[Any, str]:
    """Return transformers' configuration of a config.json, and the class that computes it.

    Raises InvalidRequest for a model that transformers does not have, and in its words for what it
    refuses. Code that a checkpoint brings is never run.
    """
    kind = config.get("model_type")
    known = architecture in CAUSAL or architecture.endswith(_WITH_OTHER_PARTS)
    if not known or not isinstance(kind, str) or kind not in CONFIG_MAPPING:
        own = "; code of a checkpoint (--trust-remote-code) is never run"
        raise InvalidRequest(
            f"unknown architecture '{architecture}'" + own * ("auto_map" in config),
            param="architecture",
        )
    try:
        made = CONFIG_MAPPING[kind].from_dict(
            CONFIG_MAPPING[kind]._decode_special_floats(
                {key: value for key, value in config.items() if key != "quantization_config"}
            )
        )
    except Exception as error:
        raise InvalidRequest(f"config.json: {error}", param="model") from error
    if architecture not in CAUSAL:
        return _text_of(architecture, made)
    if type(made) is not getattr(transformers, architecture).config_class:
        raise InvalidRequest(
            f"config.json: {architecture} is no model of type {kind}", param="model"
        )
    return made, architecture


def _text_of(architecture: str, whole: Any) -> tuple[Any, str]:
    """Return the configuration of the text of a model with other parts, and its class."""
    text = whole.get_text_config(decoder=True)
    causal = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(text.model_type, "")
    if text is whole or causal not in CAUSAL:
        raise InvalidRequest(
            f"unknown architecture '{architecture}': transformers has no class of its text alone",
            param="architecture",
        )
    text.tie_word_embeddings = getattr(whole, "tie_word_embeddings", text.tie_word_embeddings)
    return text, causal


_NAMES = "hidden_size", "vocab_size", "num_hidden_layers", *_LENGTHS


def _text_fields(library: Any) -> Fields:
    """Return the sizes of a decoder by their usual names, whatever its configuration calls them."""
    text = library.get_text_config(decoder=True)
    usual = {name: getattr(text, name) for name in _NAMES if hasattr(text, name)}
    return Fields({**text.to_dict(), **usual})


def _checked(
    architecture: str, layers: tuple[AttentionFacts, ...], num_layers: int
) -> tuple[AttentionFacts, ...]:
    if not layers:
        raise InvalidRequest(
            f"{architecture} attends by code of its own, or not at all: not served", param="model"
        )
    if len(layers) < num_layers:
        others = f"{num_layers - len(layers)} of {num_layers} layers that do not attend"
        raise InvalidRequest(f"{architecture} has {others}: not served", param="model")
    if len({layer.module for layer in layers}) < num_layers:
        raise InvalidRequest(f"{architecture} uses a layer more than once", param="model")
    most = max(layer.num_kv_heads for layer in layers)
    if any(most % layer.num_kv_heads or layer.num_heads % most for layer in layers):
        raise InvalidRequest(
            f"{architecture} has layers of numbers of KV heads that do not go together",
            param="model",
        )
    return layers


def _heads_of_cache(layers: Sequence[AttentionFacts]) -> tuple[int, int]:
    """Return query heads and KV heads. A key that all queries of a token share is kept once more
    for every MAX_GROUP of them, which is the most that kernels take."""
    heads = max(layer.num_heads for layer in layers)
    kv_heads = max(layer.num_kv_heads for layer in layers)
    if kv_heads == 1:
        kv_heads = -(-heads // MAX_GROUP)
    return -(-heads // kv_heads) * kv_heads, kv_heads


def _max_position(text: Fields, layers: Sequence[AttentionFacts]) -> int:
    """Return the longest sequence: in chunks, and with logarithms of positions, the first of each.

    Rotary embeddings of the type `dynamic` change beyond these positions only.
    """
    known = (name for name in _LENGTHS if name in text)
    alibi = any(layer.alibi for layer in layers)
    usual = {"default": _ALIBI_LENGTH} if alibi else {}
    most = text.size(next(known, _LENGTHS[0]), MAX_POSITION, least=2, **usual)
    if CHUNKED_ATTENTION in text.texts("layer_types"):
        most = min(most, text.size("attention_chunk_size", MAX_POSITION))
    if text.flag("attn_temperature_tuning", default=False):
        most = min(most, text.size("floor_scale", MAX_POSITION) - 1)
    return min(most, ALIBI_POSITIONS) if alibi else most
