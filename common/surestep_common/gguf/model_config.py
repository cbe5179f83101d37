"""Make config.json and generation_config.json from the metadata of a GGUF file."""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from typing import Any, NamedTuple

from .header import Header, refuse, shown

ROPE_FACTORS = "rope_freqs.weight"  # by which frequencies are divided, f32[head_dim / 2]
_SPECIAL_IDS = {"bos_token_id": "bos_token_id", "pad_token_id": "padding_token_id"}
_ENDS = "eos_token_id", "eot_token_id", "eom_token_id"  # of a text, a turn, a message


class Architecture(NamedTuple):
    """A family as Hugging Face calls it."""

    name: str
    model_type: str


ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture("LlamaForCausalLM", "llama"),
    "qwen2": Architecture("Qwen2ForCausalLM", "qwen2"),
    "qwen3": Architecture("Qwen3ForCausalLM", "qwen3"),
}
# What the dominant type of the weights says of the one to compute in.
_DTYPES = {"F32": "float32", "F16": "float16"}


def architecture_of(header: Header) -> str:
    """Return the file's own name of the family. Raises InvalidRequest for one not served."""
    name = header.text("general.architecture")
    if name not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        refuse(
            header.path, f"architecture {shown(name)} is not supported as GGUF; supported: {known}"
        )
    return name


def head_counts(header: Header) -> tuple[int, int]:
    """Return the numbers of heads, and of KV heads. Raises InvalidRequest."""
    key = f"{architecture_of(header)}.attention.head_count"
    heads = _uniform(header, key)
    counts = heads, _uniform(header, f"{key}_kv", heads)
    if any(type(count) is not int or count < 1 for count in counts):
        refuse(header.path, f"{key} is no number of heads")
    return counts


def config_of(header: Header) -> dict[str, Any]:
    """Return the content of config.json. Raises InvalidRequest for what is not served."""
    family = architecture_of(header)
    name, model_type = ARCHITECTURES[family]
    _refuse_unserved(header, family)
    heads, kv_heads = head_counts(header)
    hidden = header.number(f"{family}.embedding_length")
    head_dim = header.number(f"{family}.attention.key_length", hidden // heads)
    biased = "blk.0.attn_q.bias" in header.tensors
    return {
        "architectures": [name],
        "model_type": model_type,
        "vocab_size": _vocab_size(header),
        "hidden_size": hidden,
        "intermediate_size": _uniform(header, f"{family}.feed_forward_length"),
        "num_hidden_layers": header.number(f"{family}.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": header.number(f"{family}.context_length"),
        "rms_norm_eps": header.number(f"{family}.attention.layer_norm_rms_epsilon"),
        "rope_parameters": _rope(header, family, head_dim),
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "attention_bias": biased and family == "llama",
        "mlp_bias": "blk.0.ffn_up.bias" in header.tensors,
        "dtype": _dtype(header),
        "quantization_config": {"quant_method": "gguf"},
    }


def generation_config_of(header: Header) -> dict[str, Any]:
    """Return the content of generation_config.json."""
    found = {
        name: header.metadata.get(f"tokenizer.ggml.{key}") for name, key in _SPECIAL_IDS.items()
    }
    ids = {header.metadata.get(f"tokenizer.ggml.{key}") for key in _ENDS}
    ends = sorted(id_ for id_ in ids if type(id_) is int)
    ids_of = {name: id_ for name, id_ in found.items() if type(id_) is int}
    return ids_of | ({"eos_token_id": ends} if ends else {}) | _sampling(header)


def _sampling(header: Header) -> dict[str, Any]:
    """Return the sampling that the file recommends."""
    names = {"temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p"}
    return {
        name: header.number(f"general.sampling.{key}")
        for key, name in names.items()
        if f"general.sampling.{key}" in header.metadata
    }


def _refuse_unserved(header: Header, family: str) -> None:
    for what in ("expert_count", "attention.sliding_window"):
        if header.number(f"{family}.{what}", 0):
            refuse(header.path, f"{family}.{what} is not supported as GGUF")
    if header.metadata.get(f"{family}.attention.causal") is False:
        refuse(header.path, "attention in both directions is not supported")


def _uniform(header: Header, key: str, default: int | None = None) -> int:
    """Return a number that may be listed for each layer, and must be the same in all of them."""
    values = header.metadata.get(key, default)
    if isinstance(values, list):
        if len(set(values)) != 1:
            refuse(header.path, f"{key} differs between layers, which is not supported")
        header = header._replace(metadata={key: values[0]})
    value: int = header.number(key, default)
    return value


def _vocab_size(header: Header) -> int:
    table = header.tensors.get("token_embd.weight")
    if table is None or len(table.shape) != 2:
        refuse(header.path, "it has no token_embd.weight")
    return table.shape[0]


def _rope(header: Header, family: str, head_dim: int) -> dict[str, Any]:
    key = f"{family}.rope"
    rotated = header.number(f"{key}.dimension_count", head_dim)
    if (
        rotated != head_dim
        or header.number(f"{family}.attention.value_length", head_dim) != head_dim
    ):
        refuse(header.path, "heads that are rotated in part, or of two sizes, are not supported")
    base = {"rope_theta": header.number(f"{key}.freq_base", 10_000.0)}
    kind = header.text(f"{key}.scaling.type", "none")
    if kind not in ("none", "linear", "yarn"):
        refuse(header.path, f"rope scaling {shown(kind)} is not supported")
    if ROPE_FACTORS in header.tensors:
        if kind != "none":
            refuse(header.path, f"rope scaling {kind} beside {ROPE_FACTORS} is not supported")
        return base | {"rope_type": "divided", "divisors": _divisors(header, head_dim)}
    if kind == "none":
        return base | {"rope_type": "default"}
    factor = header.number(f"{key}.scaling.factor", header.number(f"{key}.scale_linear", 1.0))
    if kind == "linear":
        return base | {"rope_type": "linear", "factor": factor}
    if header.number(f"{key}.scaling.attn_factor", 1.0) != 1.0:
        refuse(header.path, f"{key}.scaling.attn_factor is not supported")
    original = header.number(f"{key}.scaling.original_context_length")
    return base | {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": original,
        "truncate": True,
    }


def _divisors(header: Header, head_dim: int) -> list[float]:
    """Return what each frequency is divided by: how converters write the scaling of Llama 3."""
    place = header.tensors[ROPE_FACTORS]
    if place.type.name != "F32" or place.shape != (head_dim // 2,):
        refuse(header.path, f"{ROPE_FACTORS} is not F32 [{head_dim // 2}]")
    factors = struct.unpack(f"<{head_dim // 2}f", header.read(place))
    if not all(math.isfinite(factor) and factor > 0 for factor in factors):
        refuse(header.path, f"{ROPE_FACTORS} holds what is no factor")
    return list(factors)


def _dtype(header: Header) -> str:
    """Return the type to compute in: that of the matrices if they are all of one, else bfloat16."""
    kinds = {place.type.name for place in header.tensors.values() if len(place.shape) > 1}
    return _DTYPES.get(kinds.pop(), "bfloat16") if len(kinds) == 1 else "bfloat16"
