"""The tiny hybrid's shape, and how it is written as a Hugging Face folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    GenerationConfig,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
    TokenizersBackend,
)

from .corpus import END_OF_TEXT, TURN_END, VOCAB_SIZE

_HIDDEN = 192
_LAYERS = 8


def new_trunk(max_length: int) -> Qwen3_5ForCausalLM:
    """Six gated delta rule layers and, every fourth, a gated full attention layer."""
    published: dict[str, Any] = {  # in config.json files, yet unknown to the class
        "full_attention_interval": 4,
        "attn_output_gate": True,
        "mamba_ssm_dtype": "float32",
        "mtp_num_hidden_layers": 1,
        "mtp_use_dedicated_embeddings": False,
    }
    config = Qwen3_5TextConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=_HIDDEN,
        intermediate_size=2 * _HIDDEN,
        num_hidden_layers=_LAYERS,
        layer_types=["linear_attention", "linear_attention", "linear_attention", "full_attention"]
        * (_LAYERS // 4),
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=32,
        linear_value_head_dim=32,
        max_position_embeddings=max_length,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.25,
            "mrope_interleaved": True,
            "mrope_section": [2, 1, 1],
        },
        tie_word_embeddings=True,
        eos_token_id=VOCAB_SIZE - 7,
        **published,
    )
    return Qwen3_5ForCausalLM(config)


def new_head(trunk: Qwen3_5ForCausalLM) -> dict[str, Tensor]:
    """A head that starts as a copy of the trunk's last layer, fed mostly with the hidden state."""
    weights = trunk.state_dict()
    prefix = f"model.layers.{_LAYERS - 1}."
    head = {
        "mtp.layers.0." + name.removeprefix(prefix): weight.clone()
        for name, weight in weights.items()
        if name.startswith(prefix)
    }
    identity = torch.eye(_HIDDEN)
    head["mtp.fc.weight"] = torch.cat([0.5 * identity, identity], dim=1)
    head["mtp.pre_fc_norm_embedding.weight"] = torch.zeros(_HIDDEN)
    head["mtp.pre_fc_norm_hidden.weight"] = torch.zeros(_HIDDEN)
    head["mtp.norm.weight"] = weights["model.norm.weight"].clone()
    return head


def save(
    folder: Path, trunk: Qwen3_5ForCausalLM, head: dict[str, Tensor], tokenizer: TokenizersBackend
) -> None:
    """Write config, generation config, tokenizer and one bf16 safetensors file."""
    endings = [tokenizer.convert_tokens_to_ids(token) for token in (TURN_END, END_OF_TEXT)]
    trunk.generation_config = GenerationConfig(eos_token_id=endings, pad_token_id=endings[1])
    trunk.bfloat16().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    path = folder / "model.safetensors"
    weights = load_file(path)
    weights |= {name: weight.detach().bfloat16() for name, weight in head.items()}
    save_file(weights, path, metadata={"format": "pt"})
