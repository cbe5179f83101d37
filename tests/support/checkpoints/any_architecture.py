"""Tiny configurations of whatever causal architecture transformers has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import transformers

ROPE, ORIGINAL = "rope_parameters", "original_max_position_embeddings"
# By the names that configurations have for them; each takes those that it knows.
_SIZES: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "dim", "embedding_size"), 64),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size"), 96),
    **dict.fromkeys(("inner_dim", "ffn_hidden_dim"), 96),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers", "n_layers"), 2),
    **dict.fromkeys(("encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(("num_encoder_layers", "num_decoder_layers"), 2),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 96),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "attention_chunk_size"), 64),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_k", "moe_topk"), 2),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 32),
    **dict.fromkeys(("shared_intermediate_size", "moe_shared_expert_intermediate_size"), 32),
    **dict.fromkeys(("n_group", "topk_group", "first_k_dense_replace"), 1),
    **dict.fromkeys(("n_shared_experts", "num_shared_experts", "moe_layer_start_index"), 1),
    **dict.fromkeys(("head_dim", "global_head_dim", "v_head_dim", "qk_nope_head_dim"), 16),
    **dict.fromkeys(("qk_rope_head_dim", "rotary_dim", "sliding_window"), 8),
    "hidden_size_per_layer_input": 8,
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), 203),
    **dict.fromkeys(("is_decoder", "is_causal"), True),
    "moe_num_experts": 4,
    "num_key_value_heads": 2,
    "word_embed_proj_dim": 64,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_head_dim": 24,
    "attention_dropout": 0.0,
}
_GEMMA: dict[str, Any] = {  # some layers have keys of their own, the others those of a layer before
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_kv_shared_layers": 2,
}
# Fields of single architectures that no name above stands for.
_OWN: dict[str, dict[str, Any]] = {
    "DbrxForCausalLM": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 1.0, "rope_theta": 10_000.0},
        "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "GPTNeoForCausalLM": {"attention_types": [[["global", "local"], 1]], "window_size": 8},
    "Llama4ForCausalLM": {
        "num_experts_per_tok": 1,
        "intermediate_size_mlp": 96,
        "no_rope_layers": [1, 0],
    },
    "Mamba2ForCausalLM": {"num_heads": 8},
    "ZayaForCausalLM": {"num_experts_per_tok": 1},
    "Gemma3nForCausalLM": {**_GEMMA, "laurel_rank": 8},
    "Gemma4ForCausalLM": _GEMMA,
    "Gemma4UnifiedForCausalLM": {**_GEMMA, "num_kv_shared_layers": 0},
    "GraniteMoeHybridForCausalLM": {"layer_types": ["attention"] * 2},
    "Inkling2ForCausalLM": {"unpadded_vocab_size": 203},
    "Inkling2LoopForCausalLM": {"unpadded_vocab_size": 203},
    "CohereCompassForCausalLM": {
        "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 10_000.0}}
    },
    "Lfm2MoeForCausalLM": {"layer_types": ["full_attention"] * 2, "num_dense_layers": 1},
    "MusicgenForCausalLM": {"num_codebooks": 1},
    "MusicgenMelodyForCausalLM": {"num_codebooks": 1},
    "XmodForCausalLM": {"default_language": "en_XX"},
}
_NOT_SET: dict[str, tuple[str, ...]] = {  # sizes that these cannot be told
    **dict.fromkeys(("BambaForCausalLM", "FalconH1ForCausalLM"), ("layer_types",)),
    "ProphetNetForCausalLM": ("num_hidden_layers",),
    "RecurrentGemmaForCausalLM": ("layer_types",),
    "XLNetLMHeadModel": ("max_position_embeddings",),
}
_ONLY_IF_SET = ("sliding_window", "attention_chunk_size")
_OF_LATENTS = "num_key_value_heads", "head_dim"  # which latents decide
_ATTENTION = {"full_attention", "sliding_attention", "chunked_attention"}


def tiny_config(architecture: str, **fields: Any) -> Any:
    """Return a configuration of two narrow layers. Raises what transformers raises."""
    kind = getattr(transformers, architecture).config_class
    usual = kind()
    text = usual.get_text_config(decoder=True)
    not_set = _NOT_SET.get(architecture, ())
    sizes = {n: size for n, size in _SIZES.items() if n not in not_set and _takes(text, n)}
    for name, other in getattr(kind, "attribute_map", {}).items():
        if name in sizes and other in sizes:
            del sizes[name]
    if _has_latents(text):  # each head has keys and values of its own
        sizes |= {"num_key_value_heads": sizes["num_attention_heads"], "head_dim": 8}
    typed = hasattr(text, "layer_types") and _takes(text, "layer_types")
    if typed and "layer_types" not in not_set:
        types = list(getattr(text, "layer_types", None) or ())
        # Of so many layers; a kind that is no attention is kept, to be refused.
        sizes["layer_types"] = types[:2] if {*types} - _ATTENTION else None
    own = _OWN.get(architecture, {})
    made = _made(text, {**sizes, "bos_token_id": 1, "eos_token_id": 2, **own, **fields})
    if text is usual:
        return made
    for name in ("text_config", "decoder"):
        if hasattr(usual, name):
            setattr(usual, name, made)
    return usual


def fields_of(architecture: str, shape: Mapping[str, Any]) -> dict[str, Any]:
    """Return what configurations of an architecture know of a shape."""
    text = getattr(transformers, architecture).config_class().get_text_config(decoder=True)
    latent = _has_latents(text)
    known = {
        name: value
        for name, value in shape.items()
        if name != ROPE and _takes(text, name) and not (latent and name in _OF_LATENTS)
    }
    rope = getattr(text, ROPE, None)
    if rope and ROPE in shape:
        known[ROPE] = _scaled(rope, shape[ROPE], known.get("head_dim", _SIZES["head_dim"]))
    return known


def _has_latents(config: Any) -> bool:
    try:
        return bool(getattr(config, "kv_lora_rank", None))
    except RuntimeError:  # it differs from layer to layer
        return True


def _scaled(rope: Mapping[str, Any], scaling: Mapping[str, Any], head_dim: int) -> dict[str, Any]:
    """Return rotary embeddings that are scaled, in layers that see all where others do not."""
    if "full_attention" in rope:
        return {**rope, "full_attention": _scaled(rope["full_attention"], scaling, head_dim)}
    made = {**rope, **scaling}
    if scaling["rope_type"] == "longrope":
        pairs = int(head_dim * rope.get("partial_rotary_factor", 1.0)) // 2
        made |= {"short_factor": [1.0] * pairs, "long_factor": [2.0] * pairs}
    return made


def _made(usual: Any, fields: dict[str, Any]) -> Any:
    """Return a configuration that has padding where the usual one has it."""
    pad = getattr(usual, "pad_token_id", None)
    return type(usual)(**fields, pad_token_id=pad if pad is None else min(pad, 1))


def _takes(config: Any, name: str) -> bool:
    """Return whether a configuration has a size of this name, which can be given."""
    field = getattr(type(config), name, None)
    if isinstance(field, property) and field.fset is None:
        return False
    try:
        value = getattr(config, name)
    except AttributeError:
        return name in getattr(type(config), "attribute_map", {})
    except (ValueError, RuntimeError):  # it differs from layer to layer
        return True
    return value is not None or name not in _ONLY_IF_SET
