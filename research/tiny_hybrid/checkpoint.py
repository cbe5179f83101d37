"""The tiny hybrid's shape, and how it is written as a Hugging Face folder."""

from __future__ import annotations

import math
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
_SPREAD = 0.05  # of the weights of a new head


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
        eos_token_id=VOCAB_SIZE - 7,  # END_OF_TEXT, the first of the added tokens
        **published,
    )
    trunk = Qwen3_5ForCausalLM(config)
    for name, parameter in trunk.named_parameters():
        if name.endswith("dt_bias"):
            parameter.data.copy_(_time_steps(len(parameter)))
    return trunk


def _time_steps(heads: int) -> Tensor:
    """Biases whose softplus is spread evenly, on a log scale, over 0.001 to 1.

    Published models start so (Mamba-2, Dao and Gu, 2024); the class's own value makes every head
    forget within a token or two.
    """
    steps = torch.exp(torch.empty(heads).uniform_(math.log(1e-3), 0.0))
    return steps + torch.log(-torch.expm1(-steps))


def new_head(trunk: Qwen3_5ForCausalLM) -> dict[str, Tensor]:
    """An untrained head of the trunk's shapes, which at first passes the hidden state on."""
    weights = trunk.state_dict()
    prefix = f"model.layers.{_LAYERS - 1}."
    shapes = {
        "mtp.layers.0." + name.removeprefix(prefix): weight.shape
        for name, weight in weights.items()
        if name.startswith(prefix)
    }
    shapes |= {f"mtp.pre_fc_norm_{of}.weight": (_HIDDEN,) for of in ("embedding", "hidden")}
    # Norms multiply by one plus their weight.
    head = {
        name: torch.zeros(shape) if "norm" in name else torch.empty(shape).normal_(0.0, _SPREAD)
        for name, shape in shapes.items()
    }
    mixed = torch.empty(_HIDDEN, _HIDDEN).normal_(0.0, _SPREAD)
    head["mtp.fc.weight"] = torch.cat([mixed, torch.eye(_HIDDEN)], dim=1)
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
