"""What a checkpoint's config.json says, in one frozen object; whatever is not served is refused."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from surestep_common.errors import InvalidRequest

from surestep_worker.layers.rotary import Llama3Scaling, RopeConfig

from .quantization import Quantization, read_quantization

T = TypeVar("T")

logger = logging.getLogger(__name__)

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Traits(NamedTuple):
    """Where a dense architecture differs from Llama. None: the config file decides."""

    qkv_bias: bool | None = None  # None: `attention_bias`, which also biases the output projection
    qk_norm: bool = False  # normalise each head of q and k before rotating
    window_switch: str | None = None  # key that must be true for `sliding_window` to count


DENSE_ARCHITECTURES: Mapping[str, Traits] = {
    "LlamaForCausalLM": Traits(window_switch="use_sliding_window"),
    "MistralForCausalLM": Traits(qkv_bias=False),
    "Qwen2ForCausalLM": Traits(qkv_bias=True, window_switch="use_sliding_window"),
    "Qwen3ForCausalLM": Traits(qk_norm=True, window_switch="use_sliding_window"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Architecture of a dense decoder. Sizes are of the whole model, not of one rank."""

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
    sliding_window: int | None  # tokens each token sees, itself included
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    tie_word_embeddings: bool
    eos_token_ids: tuple[int, ...]
    checkpoint_dtype: str
    quantization: Quantization | None

    @classmethod
    def from_pretrained(cls, path: Path) -> ModelConfig:
        """Read config.json and generation_config.json of a model folder.

        Raises InvalidRequest naming what is missing, unknown or not served.
        """
        raw = read_json(path / "config.json")
        architecture = architecture_of(raw)
        traits = lookup(architecture, DENSE_ARCHITECTURES)
        refuse_unserved(raw)
        heads = required(raw, "num_attention_heads")
        attention_bias = bool(raw.get("attention_bias", False))
        return cls(
            architecture=architecture,
            vocab_size=required(raw, "vocab_size"),
            hidden_size=required(raw, "hidden_size"),
            intermediate_size=required(raw, "intermediate_size"),
            num_layers=required(raw, "num_hidden_layers"),
            num_heads=heads,
            num_kv_heads=raw.get("num_key_value_heads") or heads,
            head_dim=raw.get("head_dim") or required(raw, "hidden_size") // heads,
            max_position=required(raw, "max_position_embeddings"),
            rms_norm_eps=required(raw, "rms_norm_eps"),
            rope=read_rope(raw),
            sliding_window=_sliding_window(raw, traits),
            qkv_bias=attention_bias if traits.qkv_bias is None else traits.qkv_bias,
            o_bias=attention_bias and traits.qkv_bias is None,
            mlp_bias=bool(raw.get("mlp_bias", False)),
            qk_norm=traits.qk_norm,
            tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
            eos_token_ids=read_eos_token_ids(path, raw),
            checkpoint_dtype=raw.get("dtype") or raw.get("torch_dtype") or "float32",
            quantization=read_quantization(raw),
        )

    @property
    def max_length(self) -> int:
        """Longest sequence served, tokens: up to its window a windowed model attends to all."""
        return min(self.max_position, self.sliding_window or self.max_position)

    def check_length(self, max_model_len: int) -> None:
        """Raise InvalidRequest when sequences of `max_model_len` tokens cannot be served."""
        if max_model_len <= self.max_length:
            return
        limit = f"has {self.max_position} positions"
        if self.max_length < self.max_position:
            limit = f"has a sliding window of {self.sliding_window} tokens, which is not supported"
        raise InvalidRequest(
            f"max_model_len {max_model_len}: the model {limit}; use {self.max_length} at most",
            param="max_model_len",
        )

    def check_ranks(self, size: int) -> None:
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
            dtype = "bfloat16"
    return lookup(dtype, _DTYPES, "dtype")


def read_json(path: Path) -> dict[str, Any]:
    """Parse one file of a model folder. Raises InvalidRequest when it is missing or no object."""
    try:
        parsed = json.loads(path.read_bytes())
    except OSError as error:
        raise InvalidRequest(f"cannot read {path}: {error.strerror}", param="model") from error
    except ValueError as error:
        raise InvalidRequest(f"{path} is not JSON: {error}", param="model") from error
    if not isinstance(parsed, dict):
        raise InvalidRequest(f"{path} is not a JSON object", param="model")
    return parsed


def architecture_of(raw: Mapping[str, Any]) -> str:
    """First entry of `architectures`."""
    names = raw.get("architectures") or ()
    if not names:
        raise InvalidRequest("config.json names no architecture", param="architecture")
    return str(names[0])


def lookup(name: str, known: Mapping[str, T], param: str = "architecture") -> T:
    """known[name]. Raises InvalidRequest, naming what is known, without it."""
    if name not in known:
        raise InvalidRequest(f"unknown {param} '{name}'; known: {', '.join(known)}", param=param)
    return known[name]


def required(raw: Mapping[str, Any], key: str) -> Any:
    """raw[key]. Raises InvalidRequest when it is missing or null."""
    if raw.get(key) is None:
        raise InvalidRequest(f"config.json lacks {key}", param="model")
    return raw[key]


def refuse_unserved(raw: Mapping[str, Any]) -> None:
    """Raise InvalidRequest for features that no model here serves."""
    for key, served in (("hidden_act", "silu"), ("partial_rotary_factor", 1.0)):
        if raw.get(key, served) != served:
            raise InvalidRequest(f"{key} {raw[key]} is not supported", param="model")


def read_rope(raw: Mapping[str, Any]) -> RopeConfig:
    """From `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (before)."""
    scaling = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    theta = float(scaling.get("rope_theta") or raw.get("rope_theta") or 10_000.0)
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if scaling.get("partial_rotary_factor", 1.0) != 1.0:
        raise InvalidRequest("partial rotary embeddings are not supported", param="model")
    if kind == "default":
        return RopeConfig(theta=theta)
    if kind == "linear":
        return RopeConfig(theta=theta, linear_factor=float(required(scaling, "factor")))
    if kind == "llama3":
        llama3 = Llama3Scaling(
            factor=float(required(scaling, "factor")),
            low_freq_factor=float(required(scaling, "low_freq_factor")),
            high_freq_factor=float(required(scaling, "high_freq_factor")),
            original_max_position=required(scaling, "original_max_position_embeddings"),
        )
        return RopeConfig(theta=theta, llama3=llama3)
    raise InvalidRequest(
        f"rope scaling '{kind}' is not supported; supported: default, linear, llama3", param="model"
    )


def _sliding_window(raw: Mapping[str, Any], traits: Traits) -> int | None:
    window: int | None = raw.get("sliding_window")
    if traits.window_switch is not None:
        window = window if raw.get(traits.window_switch, False) else None
        layer_types: Iterable[str] = raw.get("layer_types") or ("sliding_attention",)
        window = window if "sliding_attention" in layer_types else None
    return window


def read_eos_token_ids(path: Path, raw: Mapping[str, Any]) -> tuple[int, ...]:
    """Of generation_config.json, which lists the end of a turn too; else of config.json."""
    generation_path = path / "generation_config.json"
    generation = read_json(generation_path) if generation_path.exists() else {}
    ids = generation.get("eos_token_id")
    ids = raw.get("eos_token_id") if ids is None else ids
    if ids is None:
        return ()
    return tuple(ids) if isinstance(ids, list) else (ids,)
