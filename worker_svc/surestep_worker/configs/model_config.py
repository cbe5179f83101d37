"""Configuration of any decoder, in one frozen object; what is not served is refused."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
from surestep_common.errors import InvalidRequest

from surestep_worker.cache.kv_cache import LatentWidths
from surestep_worker.cache.recurrent import RecurrentSpec
from surestep_worker.checkpoint.formats import Quantization
from surestep_worker.checkpoint.json_fields import Fields
from surestep_worker.checkpoint.model_folder import ConfigFiles

from .rope import MAX_FACTOR, MAX_POSITION, RopeConfig, rope_kind, rope_parameters

T = TypeVar("T")

logger = logging.getLogger(__name__)

# Several times what any published model has, and little enough to be counted up to.
MAX_VOCAB = 1 << 22
MAX_WIDTH = 1 << 20  # of a hidden state or inside a layer
MAX_LAYERS = 1 << 10
MAX_HEADS = 1 << 12
MAX_HEAD_DIM = 1 << 12
_MAX_EXPERTS = 1 << 12
_MAX_EXPERTS_IN_ALL = 1 << 18  # of all layers

FULL_ATTENTION, LINEAR_ATTENTION = "full_attention", "linear_attention"
SLIDING_ATTENTION = "sliding_attention"
LATENT_ATTENTION = "latent_attention"
# Have keys and values, or latents, in the KV cache.
PAGED = frozenset((FULL_ATTENTION, SLIDING_ATTENTION, LATENT_ATTENTION))

_MOST_LISTED = 6  # names in a message
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class MtpTraits(NamedTuple):
    """Where an MTP head differs from that of Qwen3-Next."""

    blind_at_first: bool = False  # it was trained without the token behind the first
    before_norm: bool = False  # it reads the model's residual stream, not the normed state
    hidden_first: bool = False  # it joins that with the embedding behind it


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Architecture of a decoder. Sizes are of the whole model, not of one rank."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int  # tokens
    rms_norm_eps: float
    rope: RopeConfig
    sliding_window: int | None  # tokens that a token sees in SLIDING_ATTENTION layers, with itself
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool  # each head of q and k is normalised before it is rotated
    joint_qk_norm: bool = False  # or rather all heads of q together, and all of k
    attention_scale: float | None = None  # of scores; None: head_dim ** -0.5
    attention_softcap: float = 0.0  # of scaled scores; 0 = none
    attention_sinks: bool = False  # each head has one more logit in its softmax, without a value
    unrotated_layers: frozenset[int] = frozenset()  # that know no positions: without rotation
    attention_gate: bool  # a sigmoid gate per element of attention's output
    zero_centred_norms: bool  # checkpoints hold the difference of a norm's factors from 1
    branch_norms: bool = False  # what attention and MLP make is normalised before it is added
    branch_scale: float = 1.0  # and multiplied
    local_rope: RopeConfig | None = None  # of layers with a window; None: that of all layers
    logits_divisor: float = 1.0
    logits_softcap: float = 0.0  # of logits after that; 0 = none
    layer_types: tuple[str, ...]  # the four kinds above
    rotary_dim: int  # leading elements of each head that are rotated
    tie_word_embeddings: bool
    is_backbone: bool  # without an output head, whatever else the configuration says
    eos_token_ids: tuple[int, ...]
    checkpoint_dtype: str
    quantization: Quantization | None

    def window_of(self, kind: str) -> int:
        """Return how many positions a token sees in layers of this kind, with its own; 0 = all."""
        if kind != SLIDING_ATTENTION:
            return 0
        assert self.sliding_window is not None
        return self.sliding_window

    def embedding_scale(self, dtype: torch.dtype) -> float:
        """Return the factor of embeddings in a model that computes in `dtype`."""
        return 1.0

    @property
    def draft_layer_type(self) -> str:
        """Type of an MTP head's layer."""
        return FULL_ATTENTION

    @property
    def mtp(self) -> MtpTraits:
        """Traits of an MTP head."""
        return MtpTraits()

    def latent_widths(self, num_layers: int) -> tuple[LatentWidths, ...]:
        """Return the widths that each layer, an MTP head's last, keeps; () = keys and values."""
        return ()

    def check_length(self, max_model_len: int) -> None:
        """Raise InvalidRequest when sequences of `max_model_len` tokens cannot be served."""
        if max_model_len > self.max_position:
            raise InvalidRequest(
                f"max_model_len {max_model_len}: the model has {self.max_position} positions; "
                f"use {self.max_position} at most",
                param="max_model_len",
            )

    def recurrent_spec(self, dtype: torch.dtype, ranks: int = 1) -> RecurrentSpec | None:
        """Return the contents of a rank's recurrent cache; None without linear attention."""
        return None

    def check_ranks(self, size: int, *, expert_parallel: bool = False) -> None:
        """Raise InvalidRequest when the model does not divide among `size` ranks."""
        kv_splits = self.num_kv_heads % size == 0 or size % self.num_kv_heads == 0
        if kv_splits and self.num_heads % size == 0 and self.intermediate_size % size == 0:
            return
        raise InvalidRequest(
            f"tensor_parallel_size {size} does not divide {self.num_heads} heads, "
            f"{self.num_kv_heads} KV heads and {self.intermediate_size} MLP columns",
            param="tensor_parallel_size",
        )


def resolve_dtype(dtype: str, config: ModelConfig) -> torch.dtype:
    """Dtype to compute in. "auto" is the checkpoint's own; float16, which overflows where bfloat16
    does not, becomes bfloat16. Raises InvalidRequest for any other name."""
    if dtype == "auto":
        dtype = config.checkpoint_dtype
        if dtype == "float16":
            logger.info("the checkpoint is float16; computing in bfloat16")
    if dtype == "float16":
        dtype = "bfloat16"
    return lookup(dtype, _DTYPES, "dtype")


def architecture_of(config: Mapping[str, Any]) -> str:
    """First entry of `architectures`."""
    names = Fields(config).texts("architectures")
    if not names:
        raise InvalidRequest("config.json names no architecture", param="architecture")
    return names[0]


def lookup(name: str, known: Mapping[str, T], param: str = "architecture") -> T:
    """known[name]. Raises InvalidRequest, naming what is known, or some of it, without it."""
    if name not in known:
        names, more = list(known)[:_MOST_LISTED], len(known) - _MOST_LISTED
        listed = ", ".join(names) + (f" and {more} more" if more > 0 else "")
        raise InvalidRequest(f"unknown {param} '{name}'; known: {listed}", param=param)
    return known[name]


def refuse_unserved(raw: Fields) -> None:
    """Raise InvalidRequest for features that no model here serves."""
    act = raw.text("hidden_act", "silu")
    if act != "silu":
        raise InvalidRequest(f"hidden_act {act} is not supported", param="model")
    factor = raw.number("partial_rotary_factor", 1.0, default=1.0)
    if factor != 1.0:
        raise InvalidRequest(f"partial_rotary_factor {factor} is not supported", param="model")
    both_ways = raw.flag("use_bidirectional_attention", default=False)
    if both_ways or not raw.flag("is_causal", default=True):
        raise InvalidRequest("attention in both directions is not supported", param="model")


def refuse_deep_heads(raw: Fields, key: str) -> None:
    """Raise InvalidRequest for MTP heads of several layers."""
    if raw.size(key, MAX_LAYERS, least=0, default=1) > 1:
        raise InvalidRequest("MTP heads of more than one layer are not served", param="model")


def read_sizes(raw: Fields) -> dict[str, Any]:
    """The fields of ModelConfig that every decoder has."""
    heads = raw.size("num_attention_heads", MAX_HEADS)
    kv_heads = raw.size("num_key_value_heads", MAX_HEADS, default=heads)
    hidden = raw.size("hidden_size", MAX_WIDTH)
    head_dim = raw.size("head_dim", MAX_HEAD_DIM, default=hidden // heads)
    if heads % kv_heads or head_dim % 2:
        raise InvalidRequest(
            f"config.json: {heads} heads of {head_dim} elements do not go with {kv_heads} KV heads",
            param="model",
        )
    return {
        "vocab_size": raw.size("vocab_size", MAX_VOCAB),
        "hidden_size": hidden,
        "num_layers": raw.size("num_hidden_layers", MAX_LAYERS),
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": head_dim,
        "max_position": _max_position(raw),
        "rms_norm_eps": raw.number("rms_norm_eps", 1.0),
    }


def _max_position(raw: Fields) -> int:
    """The positions of a model. YaRN stretches those that it was trained with, though the files of
    some models tell these alone."""
    named, rope = raw.size("max_position_embeddings", MAX_POSITION, least=2), rope_parameters(raw)
    trained = rope.size("original_max_position_embeddings", MAX_POSITION, default=0, least=0)
    if not trained or rope_kind(rope) != "yarn":
        return named
    return max(named, min(int(trained * rope.number("factor", MAX_FACTOR)), MAX_POSITION))


def read_num_experts(raw: Fields, key: str) -> int:
    """The experts of a layer."""
    experts, layers = raw.size(key, _MAX_EXPERTS), raw.size("num_hidden_layers", MAX_LAYERS)
    if experts * layers > _MAX_EXPERTS_IN_ALL:
        raise InvalidRequest(
            f"{layers} layers of {experts} experts are not served: {_MAX_EXPERTS_IN_ALL} in all"
            " are the most",
            param="model",
        )
    return experts


def read_dense_layers(raw: Fields) -> frozenset[int]:
    """The layers of Qwen's sparse models that have no experts."""
    layers = raw.size("num_hidden_layers", MAX_LAYERS)
    step = raw.size("decoder_sparse_step", MAX_LAYERS, default=1)
    skipped = (i for i in range(layers) if (i + 1) % step)
    return frozenset((*raw.sizes("mlp_only_layers", layers), *skipped))


def read_layer_types(raw: Fields, usual: Sequence[str]) -> tuple[str, ...]:
    """The kinds of attention of a decoder's layers; what is `usual` where the file does not say."""
    types = raw.texts("layer_types") or tuple(usual)
    unknown = sorted(set(types) - {FULL_ATTENTION, SLIDING_ATTENTION})
    if unknown:
        raise InvalidRequest(f"layers of {', '.join(unknown)} are not served", param="model")
    if len(types) != len(usual):
        raise InvalidRequest(
            f"config.json: {len(types)} layer_types for {len(usual)} layers", param="model"
        )
    return types


def read_window(raw: Fields, layer_types: Sequence[str]) -> int | None:
    """Return the window of layers of a decoder; None where none of them has one."""
    if SLIDING_ATTENTION not in layer_types:
        return None
    return raw.size("sliding_window", MAX_POSITION)


def read_dtype(raw: Fields) -> str:
    """Return the dtype that the weights are meant to be computed in."""
    return raw.text("dtype", raw.text("torch_dtype", "float32"))


def read_eos_token_ids(files: ConfigFiles, raw: Fields) -> tuple[int, ...]:
    """Return the ids that end a turn of the model.

    They are those of generation_config.json, which lists the end of a turn too, else of
    config.json, and in any case the tokenizer's: fine-tunes may name their end of a turn there
    alone. Ids outside the vocabulary, which no model emits, are left out.
    """
    generation = Fields(files.generation, "generation_config.json")
    named = generation if "eos_token_id" in generation else raw
    ids = named.sizes("eos_token_id", MAX_VOCAB)
    ids += () if files.tokenizer_end is None else (files.tokenizer_end,)
    vocab_size = raw.size("vocab_size", MAX_VOCAB)
    if any(id_ >= vocab_size for id_ in ids):
        logger.warning("eos_token_id %s: the vocabulary has %d tokens", ids, vocab_size)
    return tuple(id_ for id_ in ids if id_ < vocab_size)
