"""Tiny random checkpoints of DeepSeek-V3, V3.2, GLM-5 and GLM-4.5, with MTP layers."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from support.checkpoints.quantize import quantize
from support.checkpoints.tiny import EOS_TOKEN_ID, make_tiny_tokenizer
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.models.deepseek_v3 import DeepseekV3Config
from transformers.models.deepseek_v32 import DeepseekV32Config
from transformers.models.glm4_moe import Glm4MoeConfig
from transformers.models.glm4_moe_lite import Glm4MoeLiteConfig
from transformers.models.glm_moe_dsa import GlmMoeDsaConfig

MAX_POSITION = 512
TOP_K = 8  # positions that an indexer chooses
LAYERS = 4
_KINDS: dict[str, Any] = {
    "deepseek_v3": DeepseekV3Config,
    "deepseek_v32": DeepseekV32Config,
    "glm_moe_dsa": GlmMoeDsaConfig,
    "glm4_moe": Glm4MoeConfig,
    "glm4_moe_lite": Glm4MoeLiteConfig,
}
_SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 48,
    "moe_intermediate_size": 24,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
    "norm_topk_prob": True,
    "max_position_embeddings": MAX_POSITION,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
_LATENT: dict[str, Any] = {
    "q_lora_rank": 48,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
}
# With fewer heads scores of exactly 0 are common, and transformers breaks ties by shape.
_INDEXER: dict[str, Any] = {"index_n_heads": 32, "index_head_dim": 32, "index_topk": TOP_K}
_OWN: dict[str, dict[str, Any]] = {
    "deepseek_v3": {**_LATENT, "n_group": 4, "topk_group": 2},
    "deepseek_v32": {**_LATENT, **_INDEXER, "n_group": 2, "topk_group": 1},
    "glm_moe_dsa": {**_LATENT, **_INDEXER, "index_topk_freq": 2, "index_skip_topk_offset": 2},
    "glm4_moe_lite": _LATENT,
    "glm4_moe": {"num_key_value_heads": 2, "head_dim": 16, "use_qk_norm": True},
}


def make_tiny_deepseek(
    path: Path,
    family: str = "deepseek_v3",
    *,
    vocab: int = 384,
    mtp: bool = True,
    eos_token_ids: Sequence[int] = (EOS_TOKEN_ID,),
    tokenizer: bool = False,
    seed: int = 0,
    initializer_range: float = 0.2,
    dtype: torch.dtype = torch.float32,
    **config: Any,
) -> Path:
    """Write config, weights and, if asked for, a tokenizer; returns `path`.

    Norms and biases are random too: at their usual values a loader that dropped them would pass.
    """
    torch.manual_seed(seed)
    parameters = _KINDS[family](
        vocab_size=vocab,
        initializer_range=initializer_range,
        bos_token_id=None,
        eos_token_id=list(eos_token_ids),
        num_nextn_predict_layers=1,
        **copy.deepcopy(_SIZES | _OWN[family] | config),  # transformers adds to what it is given
    )
    model = AutoModelForCausalLM.from_config(parameters, dtype=torch.float32)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            _vary(name, tensor)
    model.to(dtype).save_pretrained(path)
    if mtp:
        _add_mtp(path, parameters.num_hidden_layers, dtype)
    if tokenizer:
        make_tiny_tokenizer(path, vocab, MAX_POSITION)
    return path


def make_tiny_glm_fp8(path: Path, max_position: int) -> Path:
    """Write a GLM-5 with its MTP layer and a tokenizer; returns the folder, beside `path`, of its
    copy whose linear layers are FP8 in blocks, as in GLM-5.1-FP8."""
    make_tiny_deepseek(
        path,
        "glm_moe_dsa",
        tokenizer=True,
        num_hidden_layers=2,
        intermediate_size=64,
        moe_intermediate_size=32,
        max_position_embeddings=max_position,
    )
    return quantize(path, "fp8", plain=("gate", "weights_proj", "eh_proj")).quantized


def _vary(name: str, tensor: Tensor) -> None:
    if name.endswith("norm.weight"):
        tensor.normal_(1.0, 0.2)
    elif name.endswith(("bias", "e_score_correction_bias")):
        tensor.normal_(0.0, 0.2)
    elif name.endswith("mlp.gate.weight"):
        tensor.normal_(0.0, 0.3)


def _add_mtp(path: Path, layers: int, dtype: torch.dtype) -> None:
    """The layer behind the last one, as large as that one, and with an indexer if any layer has."""
    file = path / "model.safetensors"
    tensors = load_file(file)
    width, at = tensors["model.norm.weight"].shape[0], f"model.layers.{layers}."
    shapes = {
        "eh_proj.weight": (width, 2 * width),
        **{f"{name}.weight": (width,) for name in ("enorm", "hnorm", "shared_head.norm")},
    }
    indexers = "model.layers.0.self_attn.indexer."
    for name, tensor in tensors.items():
        if name.startswith(f"model.layers.{layers - 1}."):
            shapes[name.split(f"layers.{layers - 1}.")[1]] = tuple(tensor.shape)
        elif name.startswith(indexers):
            shapes[name.removeprefix("model.layers.0.")] = tuple(tensor.shape)
    for name, shape in shapes.items():
        made = torch.randn(shape) * 0.2
        if name.endswith("norm.weight"):
            made += 1.0
        tensors[at + name] = made.to(dtype)
    save_file(tensors, file, metadata={"format": "pt"})
