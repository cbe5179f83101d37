"""Tiny checkpoints of the families that change their branches: Gemma, OLMo and Granite."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForImageTextToText, Gemma3Config

from .tiny import make_tiny_checkpoint

WINDOW = 6
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
}
_LINEAR = {"rope_type": "linear", "factor": 4.0, "rope_theta": 3e4}
_LOCAL = {"rope_type": "default", "rope_theta": 100.0}
GEMMA3: dict[str, Any] = {
    "family": "gemma3_text",
    "layers": 3,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "query_pre_attn_scalar": 40,
    "sliding_window": WINDOW,
    "rope_parameters": {"full_attention": _LINEAR, "sliding_attention": _LOCAL},
    "tie": True,
}
# Caps that many scores and logits come near.
_CAPS = {"attn_logit_softcapping": 3.0, "final_logit_softcapping": 4.0}
VARIANTS: dict[str, dict[str, Any]] = {
    "gemma": {"family": "gemma", "head_dim": 80, "kv_heads": 1, "vocab": 390, "tie": True},
    "gemma untied": {"family": "gemma", "head_dim": 16},
    "gemma2": {
        "family": "gemma2",
        "layers": 3,
        "head_dim": 96,
        "vocab": 390,
        "query_pre_attn_scalar": 30,
        "sliding_window": WINDOW,
        "tie": True,
        **_CAPS,
    },
    "gemma2 without caps": {
        "family": "gemma2",
        "kv_heads": 1,
        "attention_bias": True,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
    },
    "gemma3": {**GEMMA3, "head_dim": 256, "kv_heads": 1, "vocab": 390},
    "gemma3 capped": {**GEMMA3, "tie": False, "final_logit_softcapping": 4.0},
    "olmo2": {"family": "olmo2", "kv_heads": 1, "vocab": 390},
    "olmo2 with biases": {"family": "olmo2", "attention_bias": True, "tie": True},
    "olmo3": {
        "family": "olmo3",
        "layers": 4,
        "sliding_window": WINDOW,
        "rope_parameters": {"full_attention": _YARN, "sliding_attention": _LOCAL},
    },
    "granite": {
        "family": "granite",
        "kv_heads": 1,
        "vocab": 390,
        "embedding_multiplier": 12.0,
        "attention_multiplier": 0.13,
        "residual_multiplier": 0.22,
        "logits_scaling": 0.7,
        "tie": True,
    },
    "granite with biases": {"family": "granite", "attention_bias": True, "mlp_bias": True},
}


def make_branch_checkpoint(path: Path, name: str, **changes: Any) -> Path:
    """Write the checkpoint of a variant; returns `path`."""
    return make_tiny_checkpoint(path, **(VARIANTS[name] | changes))


def make_gemma3_with_images(path: Path, *, tie: bool = True) -> Path:
    """Write a Gemma 3 that also reads images, as published; returns `path`."""
    text = {
        "vocab_size": 390,
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 96,
        "max_position_embeddings": 512,
        "initializer_range": 0.2,
        "sliding_window": WINDOW,
        "layer_types": ["sliding_attention", "full_attention"],
        "tie_word_embeddings": tie,
    }
    vision = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 32,
        "patch_size": 8,
    }
    config = Gemma3Config(
        text_config=text,
        vision_config=vision,
        mm_tokens_per_image=4,
        image_token_index=389,
        boi_token_index=388,
        eoi_token_index=387,
        tie_word_embeddings=tie,
        initializer_range=0.2,
    )
    torch.manual_seed(0)
    AutoModelForImageTextToText.from_config(config, dtype=torch.float32).save_pretrained(path)
    return path
