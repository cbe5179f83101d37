"""Configuration of Gemma 1, 2 and 3."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from surestep_common.errors import InvalidRequest

from surestep_worker.checkpoint.formats.gguf import Gguf
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
    read_window,
    refuse_unserved,
)
from surestep_worker.configs.quantization import read_quantization
from surestep_worker.configs.rope import read_layer_ropes, read_rope, rope_parameters

_LEAST, _MOST = 1e-3, 1e6  # of caps, and of what scores are divided by the root of
_AROUND = "eos_token_id", "dtype", "torch_dtype"  # of a text part, where it says nothing itself
_THETAS = {"theta": 1e6, "local_theta": 1e4}  # of Gemma 3


class GemmaTraits(NamedTuple):
    """Where the architectures differ. `usual`: where the file does not say, as transformers'
    class has it."""

    usual: Mapping[str, Any]
    activation: str = "hidden_activation"  # key of its name
    tanh_gelu: tuple[str, ...] = ("gelu_pytorch_tanh",)  # its names
    sandwich: bool = True  # norms behind attention and MLP, too, and a scale of the scores
    period: int | None = None  # layers, of which the last has no window; None: none has one
    local_rope: bool = False  # layers with a window have a rope of their own; norms of q and k
    nested: bool = False  # the decoder's configuration is `text_config`


_SHARED: Mapping[str, Any] = {"head_dim": 256, "rms_norm_eps": 1e-6, "tie_word_embeddings": True}
_GEMMA1: Mapping[str, Any] = {
    **_SHARED,
    "num_key_value_heads": 16,
    "hidden_act": "gelu_pytorch_tanh",
}
_GEMMA2: Mapping[str, Any] = {
    **_SHARED,
    "num_key_value_heads": 4,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
}
# Published files of models that also read images leave out most keys.
_GEMMA3: Mapping[str, Any] = {
    **_SHARED,
    "vocab_size": 262_208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 131_072,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}
_THIRD = GemmaTraits(_GEMMA3, period=6, local_rope=True)
GEMMA_ARCHITECTURES: Mapping[str, GemmaTraits] = {
    "GemmaForCausalLM": GemmaTraits(
        _GEMMA1,
        activation="hidden_act",
        tanh_gelu=("gelu_pytorch_tanh", "gelu"),  # an old file that says gelu means this one
        sandwich=False,
    ),
    "Gemma2ForCausalLM": GemmaTraits(_GEMMA2, period=2),
    "Gemma3ForCausalLM": _THIRD,
    "Gemma3ForConditionalGeneration": _THIRD._replace(nested=True),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmaConfig(ModelConfig):
    """Architecture of a Gemma decoder."""

    nested: bool  # tensors of the decoder have a longer prefix

    @classmethod
    def parse(cls, files: ConfigFiles) -> GemmaConfig:
        """Raises InvalidRequest naming what is missing, unknown, out of bounds or not served."""
        architecture, whole = architecture_of(files.config), Fields(files.config)
        traits = lookup(architecture, GEMMA_ARCHITECTURES)
        raw = _decoder(whole) if traits.nested else whole
        around = {name: files.config.get(name) for name in _AROUND}
        raw = raw.or_else({**around, **traits.usual})
        refuse_unserved(raw.without("hidden_act"))
        _refuse_other_activations(raw, traits)
        bias, sizes = raw.flag("attention_bias", default=False), read_sizes(raw)
        layer_types = _layer_types(raw, traits, sizes["num_layers"])
        quantization = read_quantization(whole)
        ropes = (
            read_layer_ropes(raw, **_THETAS)
            if traits.local_rope
            else [read_rope(raw, rope_parameters(raw))]
        )
        return cls(
            architecture=architecture,
            nested=traits.nested,
            **sizes,
            intermediate_size=raw.size("intermediate_size", MAX_WIDTH),
            rope=ropes[0],
            local_rope=ropes[-1] if traits.local_rope else None,
            sliding_window=read_window(raw, layer_types),
            qkv_bias=bias,
            o_bias=bias,
            mlp_bias=False,
            qk_norm=traits.local_rope,
            attention_gate=False,
            attention_scale=_attention_scale(raw) if traits.sandwich else None,
            attention_softcap=_attention_softcap(raw, traits),
            zero_centred_norms=not isinstance(quantization, Gguf),  # converters add 1
            branch_norms=traits.sandwich,
            layer_types=layer_types,
            rotary_dim=sizes["head_dim"],
            tie_word_embeddings=_is_tied(whole, raw),
            is_backbone=False,
            logits_softcap=_cap(raw, "final_logit_softcapping") if traits.sandwich else 0.0,
            eos_token_ids=read_eos_token_ids(files, raw),
            checkpoint_dtype=read_dtype(raw),
            quantization=quantization,
        )

    def embedding_scale(self, dtype: torch.dtype) -> float:
        """Return the root of the width, rounded as these models were trained."""
        return float(torch.tensor(self.hidden_size**0.5, dtype=dtype))


def _decoder(whole: Fields) -> Fields:
    """The configuration of the text part."""
    if "text_config" not in whole:
        raise InvalidRequest("config.json lacks text_config", param="model")
    return whole.object("text_config")


def _is_tied(whole: Fields, raw: Fields) -> bool:
    return whole.flag("tie_word_embeddings", default=raw.flag("tie_word_embeddings"))


def _refuse_other_activations(raw: Fields, traits: GemmaTraits) -> None:
    name = raw.text(traits.activation)
    if name not in traits.tanh_gelu:
        raise InvalidRequest(f"{traits.activation} {name} is not supported", param="model")


def _layer_types(raw: Fields, traits: GemmaTraits, num_layers: int) -> tuple[str, ...]:
    if traits.period is None:
        return (FULL_ATTENTION,) * num_layers
    period = traits.period
    if traits.local_rope:
        period = raw.size("sliding_window_pattern", MAX_LAYERS, default=period)
    kinds = (FULL_ATTENTION, SLIDING_ATTENTION)
    return read_layer_types(raw, [kinds[(i + 1) % period > 0] for i in range(num_layers)])


def _attention_scale(raw: Fields) -> float:
    return float(raw.number("query_pre_attn_scalar", _MOST, least=_LEAST) ** -0.5)


def _attention_softcap(raw: Fields, traits: GemmaTraits) -> float:
    """Return the cap of scores, which Gemma 2 alone has."""
    if not traits.sandwich:
        return 0.0
    cap = _cap(raw, "attn_logit_softcapping")
    if cap and traits.local_rope:
        raise InvalidRequest("attn_logit_softcapping of Gemma 3 is not supported", param="model")
    return cap


def _cap(raw: Fields, key: str) -> float:
    return raw.number(key, _MOST, least=_LEAST) if key in raw else 0.0
