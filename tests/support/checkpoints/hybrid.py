"""Tiny random checkpoints of the Qwen3-Next and Qwen3.5 families, with MTP heads."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from support.checkpoints.tiny import EOS_TOKEN_ID, make_tiny_tokenizer
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.models.qwen3_5 import Qwen3_5Config, Qwen3_5TextConfig, Qwen3_5VisionConfig
from transformers.models.qwen3_5_moe import Qwen3_5MoeTextConfig
from transformers.models.qwen3_next import Qwen3NextConfig

FAMILIES = ("qwen3_next", "qwen3_5", "qwen3_5_moe")
_SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 16,
    "max_position_embeddings": 512,
}
_MOE: dict[str, Any] = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 16,
}


def make_tiny_hybrid(
    path: Path,
    family: str = "qwen3_5",
    *,
    vocab: int = 384,
    tie: bool = False,
    mtp: bool = True,
    wrapped: bool = False,
    eos_token_ids: Sequence[int] = (EOS_TOKEN_ID,),
    tokenizer: bool = False,
    seed: int = 0,
    initializer_range: float = 0.2,
    dtype: torch.dtype = torch.float32,
    **config: Any,
) -> Path:
    """Write config, weights and, if asked for, a tokenizer; returns `path`.

    Norms, decays and biases are random too: at their usual values a loader that dropped them would
    pass. `wrapped` puts the decoder into the multimodal model, vision weights included.
    """
    torch.manual_seed(seed)
    parameters = _config(family, vocab, tie, initializer_range, list(eos_token_ids), config)
    if wrapped:
        vision = Qwen3_5VisionConfig(
            depth=1, hidden_size=16, intermediate_size=16, num_heads=2, out_hidden_size=32
        )
        whole = Qwen3_5Config(
            text_config=parameters.to_dict(),
            vision_config=vision.to_dict(),
            tie_word_embeddings=tie,
        )
        model = AutoModelForImageTextToText.from_config(whole, dtype=torch.float32)
    else:
        model = AutoModelForCausalLM.from_config(parameters, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("A_log"):  # slow decay, so that the state of long ago matters
                parameter.uniform_(0.01, 0.5).log_()
            elif parameter.dim() == 1:
                centre = 1.0 if name.endswith("linear_attn.norm.weight") else 0.0
                parameter.normal_(centre, 0.2)
            if name.endswith("mlp.gate.weight"):
                parameter.normal_(0, 1.0)
    model.to(dtype).save_pretrained(path)
    if mtp:
        add_mtp(path, initializer_range, dtype)
    if tokenizer:
        make_tiny_tokenizer(path, vocab, _SIZES["max_position_embeddings"])
    return path


def _config(
    family: str, vocab: int, tie: bool, initializer_range: float, eos: list[int], more: Any
) -> Any:
    kind = {
        "qwen3_next": Qwen3NextConfig,
        "qwen3_5": Qwen3_5TextConfig,
        "qwen3_5_moe": Qwen3_5MoeTextConfig,
    }[family]
    sizes = _SIZES | (_MOE if family != "qwen3_5" else {}) | more
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
    if family != "qwen3_next":
        rope["mrope_section"] = [2, 1, 1]
    return kind(
        vocab_size=vocab,
        tie_word_embeddings=tie,
        initializer_range=initializer_range,
        rope_parameters=rope,
        bos_token_id=None,
        eos_token_id=eos,
        pad_token_id=None,
        **sizes,
    )


def add_mtp(
    path: Path,
    initializer_range: float,
    dtype: torch.dtype = torch.float32,
    reads: Tensor | None = None,
) -> None:
    """An MTP head whose layer has the shapes of the model's last one.

    It `reads` the last token's embedding and the hidden state through this matrix, or a random one.
    """
    file, index = path / "model.safetensors", path / "config.json"
    tensors, raw = load_file(file), json.loads(index.read_text())
    sizes = raw.get("text_config", raw)
    layer, width = f"layers.{sizes['num_hidden_layers'] - 1}.", sizes["hidden_size"]
    random = torch.randn(width, 2 * width) * initializer_range
    head: dict[str, Tensor] = {
        "mtp.fc.weight": random if reads is None else reads,
        **{
            f"mtp.{name}.weight": torch.randn(width) * 0.2
            for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
        },
    }
    for name, tensor in list(tensors.items()):
        if layer in name and "visual" not in name:
            scale = 0.2 if tensor.dim() == 1 else initializer_range
            own = torch.randn(tensor.shape) * scale
            head[f"mtp.layers.0.{name.split(layer)[1]}"] = own
    tensors |= {name: tensor.to(dtype) for name, tensor in head.items()}
    save_file(tensors, file, metadata={"format": "pt"})
    sizes["mtp_num_hidden_layers"] = 1
    index.write_text(json.dumps(raw))
