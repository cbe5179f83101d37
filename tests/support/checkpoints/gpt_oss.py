"""Tiny random checkpoints of gpt-oss, with plain experts or packed ones."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from support.checkpoints.gpt_oss_moe import random_mxfp4
from support.checkpoints.quantize import Twins
from support.checkpoints.tiny import EOS_TOKEN_ID, make_tiny_tokenizer
from transformers import AutoModelForCausalLM
from transformers.integrations.mxfp4 import convert_moe_packed_tensors
from transformers.models.gpt_oss import GptOssConfig

WINDOW = 8
MAX_POSITION = 512
_SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_local_experts": 8,
    "num_experts_per_tok": 4,
    "swiglu_limit": 2.0,  # which random gates reach
    "sliding_window": WINDOW,
    "max_position_embeddings": MAX_POSITION,
}
_YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 32.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
}


def make_tiny_gpt_oss(
    path: Path,
    *,
    vocab: int = 384,
    eos_token_ids: Sequence[int] = (EOS_TOKEN_ID,),
    tokenizer: bool = False,
    seed: int = 0,
    initializer_range: float = 0.2,
    dtype: torch.dtype = torch.float32,
    **config: Any,
) -> Path:
    """Write config, weights and, if asked for, a tokenizer; returns `path`.

    Sinks, norms and biases are random too: at their usual values a loader that dropped them would
    pass. Sinks are large enough to take half of a head's weights.
    """
    parameters = GptOssConfig(
        vocab_size=vocab,
        initializer_range=initializer_range,
        rope_parameters=_YARN,
        bos_token_id=None,
        eos_token_id=list(eos_token_ids),
        pad_token_id=None,
        **(_SIZES | config),
    )
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(parameters, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("bias", "sinks")):
                parameter.normal_(2.0 if name.endswith("sinks") else 0.0, 0.5)
            elif name.endswith("norm.weight"):
                parameter.normal_(1.0, 0.2)
            elif name.endswith("router.weight"):
                parameter.normal_(0.0, 1.0)
    model.to(dtype).save_pretrained(path)
    if tokenizer:
        make_tiny_tokenizer(path, vocab, MAX_POSITION)
    return path


def make_mxfp4_twins(path: Path, **config: Any) -> Twins:
    """Write two checkpoints of one model: with packed experts, and with what these stand for."""
    twins = Twins(quantized=path / "mxfp4", plain=path / "plain")
    for folder in twins:
        make_tiny_gpt_oss(folder, **config)
    plain = load_file(twins.plain / "model.safetensors")
    packed = dict(plain)
    for name, weight in plain.items():
        if name.endswith(("gate_up_proj", "down_proj")):
            blocks, scales = random_mxfp4(*weight.transpose(1, 2).shape)
            plain[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
            del packed[name]
            packed |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    for folder, tensors in zip(twins, (packed, plain), strict=True):
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    file = twins.quantized / "config.json"
    spared = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens"]
    scheme = {"quant_method": "mxfp4", "modules_to_not_convert": [*spared, "lm_head"]}
    raw = json.loads(file.read_text()) | {"quantization_config": scheme}
    file.write_text(json.dumps(raw))
    return twins
