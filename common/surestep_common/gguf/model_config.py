"""Make config.json and generation_config.json from the metadata of a GGUF file."""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from typing import Any, NamedTuple

from .header import Header, refuse, shown

ROPE_FACTORS = "rope_freqs.weight"  # by which frequencies are divided, f32[head_dim / 2]
# The same for Phi-3, by the key of config.json: for its original positions, and beyond.
LONG_ROPE_FACTORS = {
    "short_factor": "rope_factors_short.weight",
    "long_factor": "rope_factors_long.weight",
}
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
    "qwen3moe": Architecture("Qwen3MoeForCausalLM", "qwen3_moe"),
    "phi3": Architecture("Phi3ForCausalLM", "phi3"),
    "gemma3": Architecture("Gemma3ForCausalLM", "gemma3_text"),
    "granite": Architecture("GraniteForCausalLM", "granite"),
    "olmo2": Architecture("Olmo2ForCausalLM", "olmo2"),
}
_MIXTRAL = Architecture("MixtralForCausalLM", "mixtral")  # a llama with experts
_TURN_END = "<end_of_turn>"  # of Gemma
_LAYERS_OF_27B = 62  # of Gemma, whose scores are scaled otherwise, though no key says so
# What some families have, and others must not.
_OPTIONAL = {
    "expert_count": ("llama", "qwen3moe"),
    "attention.sliding_window": ("phi3", "gemma3"),
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


def num_experts(header: Header) -> int:
    """Return the experts of a layer; 0: there are none. Raises InvalidRequest."""
    return int(header.number(f"{architecture_of(header)}.expert_count", 0))


def config_of(header: Header) -> dict[str, Any]:
    """Return the content of config.json. Raises InvalidRequest for what is not served."""
    family = architecture_of(header)
    experts = num_experts(header)
    name, model_type = _MIXTRAL if experts and family == "llama" else ARCHITECTURES[family]
    _refuse_unserved(header, family)
    heads, kv_heads = head_counts(header)
    hidden = header.number(f"{family}.embedding_length")
    head_dim = header.number(f"{family}.attention.key_length", hidden // heads)
    biased = "blk.0.attn_q.bias" in header.tensors
    config = {
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
        "attention_bias": biased and family in ("llama", "granite"),
        "mlp_bias": "blk.0.ffn_up.bias" in header.tensors,
        "dtype": _dtype(header),
        "quantization_config": {"quant_method": "gguf"},
        **(_experts(header, family, experts) if experts else {}),
        **(_phi3(header) if family == "phi3" else {}),
        **(_granite(header, head_dim) if family == "granite" else {}),
    }
    return config | _gemma3(header, config) if family == "gemma3" else config


def _experts(header: Header, family: str, count: int) -> dict[str, Any]:
    """Return what config.json says of experts, whose weights sum to 1 in these families."""
    about = {
        "num_local_experts": count,
        "num_experts_per_tok": header.number(f"{family}.expert_used_count"),
        "norm_topk_prob": True,
    }
    size = f"{family}.expert_feed_forward_length"
    return about | ({} if family == "llama" else {"moe_intermediate_size": header.number(size)})


def _phi3(header: Header) -> dict[str, Any]:
    """Return what config.json says of Phi-3 alone; a window of 0 means none."""
    positions = header.number("phi3.context_length")
    original = "phi3.rope.scaling.original_context_length"
    return {
        "original_max_position_embeddings": header.number(original, positions),
        "sliding_window": header.number("phi3.attention.sliding_window", 0) or None,
    }


def _granite(header: Header, head_dim: int) -> dict[str, Any]:
    """Return the factors of a Granite. One for scores may be missing, and is then as usual."""
    scores = header.number("granite.attention.scale", 0.0)
    return {
        "embedding_multiplier": header.number("granite.embedding_scale", 1.0),
        "attention_multiplier": scores or head_dim**-0.5,
        "residual_multiplier": header.number("granite.residual_scale", 1.0),
        "logits_scaling": header.number("granite.logit_scale"),
    }


def _gemma3(header: Header, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a Gemma 3 has beside that: windows, ropes of two kinds of layers, a scale."""
    width = config["head_dim"]
    if config["num_hidden_layers"] == _LAYERS_OF_27B:
        width = config["hidden_size"] // config["num_attention_heads"]
    local = {"rope_theta": header.number("gemma3.rope.freq_base_swa", 10_000.0)}
    ropes = {"full_attention": config["rope_parameters"], "sliding_attention": local}
    caps = {
        name: header.number(f"gemma3.{name}")
        for name in ("attn_logit_softcapping", "final_logit_softcapping")
        if f"gemma3.{name}" in header.metadata
    }
    return caps | {
        "rope_parameters": ropes,
        "query_pre_attn_scalar": width,
        "sliding_window": header.number("gemma3.attention.sliding_window"),
    }


def generation_config_of(header: Header) -> dict[str, Any]:
    """Return the content of generation_config.json."""
    found = {
        name: header.metadata.get(f"tokenizer.ggml.{key}") for name, key in _SPECIAL_IDS.items()
    }
    ids = {header.metadata.get(f"tokenizer.ggml.{key}") for key in _ENDS}
    ids |= _unnamed_ends(header)
    ends = sorted(id_ for id_ in ids if type(id_) is int)
    ids_of = {name: id_ for name, id_ in found.items() if type(id_) is int}
    return ids_of | ({"eos_token_id": ends} if ends else {}) | _sampling(header)


def _unnamed_ends(header: Header) -> set[int]:
    """Return the end of a turn of Gemma 3, which converters leave out."""
    tokens = header.items("tokenizer.ggml.tokens", str)
    known = architecture_of(header) == "gemma3" and _TURN_END in tokens
    return {tokens.index(_TURN_END)} if known else set()


def _sampling(header: Header) -> dict[str, Any]:
    """Return the sampling that the file recommends."""
    names = {"temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p"}
    return {
        name: header.number(f"general.sampling.{key}")
        for key, name in names.items()
        if f"general.sampling.{key}" in header.metadata
    }


def _refuse_unserved(header: Header, family: str) -> None:
    for what, served in _OPTIONAL.items():
        if family not in served and header.number(f"{family}.{what}", 0):
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
    in_part = rotated != head_dim and family != "phi3"
    if in_part or header.number(f"{family}.attention.value_length", head_dim) != head_dim:
        refuse(header.path, "heads that are rotated in part, or of two sizes, are not supported")
    base = {"rope_theta": header.number(f"{key}.freq_base", 10_000.0)}
    kind = header.text(f"{key}.scaling.type", "none")
    if kind not in (("none", "longrope") if family == "phi3" else ("none", "linear", "yarn")):
        refuse(header.path, f"rope scaling {shown(kind)} is not supported")
    if family == "phi3":
        part = {"partial_rotary_factor": rotated / max(head_dim, 1)}
        return base | part | _longrope(header, rotated)
    if ROPE_FACTORS in header.tensors:
        if kind != "none":
            refuse(header.path, f"rope scaling {kind} beside {ROPE_FACTORS} is not supported")
        divisors = _divisors(header, ROPE_FACTORS, head_dim)
        return base | {"rope_type": "divided", "divisors": divisors}
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


def _longrope(header: Header, rotated: int) -> dict[str, Any]:
    """Return the scaling of Phi-3, whose divisors are tensors if it has any."""
    found = {
        key: _divisors(header, name, rotated)
        for key, name in LONG_ROPE_FACTORS.items()
        if name in header.tensors
    }
    factor = header.number("phi3.rope.scaling.attn_factor", 1.0)
    return {"rope_type": "longrope", "attention_factor": factor, **found} if found else {}


def _divisors(header: Header, name: str, rotated: int) -> list[float]:
    """Return what each frequency is divided by: how converters write some scalings."""
    place, count = header.tensors[name], int(rotated) // 2
    if place.type.name != "F32" or place.shape != (count,):
        refuse(header.path, f"{name} is not F32 [{count}]")
    factors = struct.unpack(f"<{count}f", header.read(place))
    if not all(math.isfinite(factor) and factor > 0 for factor in factors):
        refuse(header.path, f"{name} holds what is no factor")
    return list(factors)


def _dtype(header: Header) -> str:
    """Return the type to compute in: that of the matrices if they are all of one, else bfloat16."""
    kinds = {place.type.name for place in header.tensors.values() if len(place.shape) > 1}
    return _DTYPES.get(kinds.pop(), "bfloat16") if len(kinds) == 1 else "bfloat16"
