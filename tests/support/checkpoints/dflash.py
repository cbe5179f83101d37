"""Tiny DFlash drafters: random ones in both published forms, and a pair that is mostly right.

The model of the pair says an id a few further than what stood `PERIOD` tokens before, and so does
its drafter: both have a head that looks at a distance, by rotary angles alone.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from support.checkpoints.tiny import make_tiny_checkpoint
from support.references.dflash import KINDS, DFlashReference
from torch import Tensor

PERIOD, _FURTHER = 12, 7  # tokens, ids
_THETA, _SHARP = 4.0, 4.0
_WIDTH, _DIM = 64, 32
_CODE, _COPY = slice(1, 32), slice(32, 63)  # what a token is, and what a layer found


def sizes_for(model: Path, **changes: Any) -> dict[str, Any]:
    """Return sizes of a drafter that is as wide as the model."""
    raw = json.loads((model / "config.json").read_text())
    raw = raw.get("text_config", raw)
    return {
        "hidden_size": raw["hidden_size"],
        "intermediate_size": 80,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 512,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        **changes,
    }


def save_drafter(
    folder: Path,
    drafter: DFlashReference,
    num_target_layers: int,
    *,
    speculators: bool = False,
    more: dict[str, Tensor] | None = None,
    **changes: Any,
) -> Path:
    """Write a drafter; `changes` are made to config.json, where None takes a field out."""
    folder.mkdir(parents=True, exist_ok=True)
    make = _speculators if speculators else _published
    config = make(drafter, num_target_layers) | changes
    config = {key: value for key, value in config.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {name: x.detach().clone().contiguous() for name, x in drafter.tensors().items()}
    save_file(tensors | (more or {}), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _layers(drafter: DFlashReference) -> dict[str, Any]:
    config = drafter.config
    keys = (
        *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
        *("num_key_value_heads", "head_dim", "rms_norm_eps", "max_position_embeddings"),
        *("layer_types", "hidden_act"),
    )
    theta = {"rope_theta": config.rope_parameters["rope_theta"]}
    window = {"sliding_window": config.sliding_window} if KINDS[1] in config.layer_types else {}
    return {key: getattr(config, key) for key in keys} | theta | window | {"model_type": "qwen3"}


def _causal(drafter: DFlashReference) -> dict[str, Any]:
    return {} if drafter.causal == (KINDS[1],) else {"is_causal": drafter.causal == KINDS}


def _published(drafter: DFlashReference, num_target_layers: int) -> dict[str, Any]:
    config = drafter.config
    about = {"mask_token_id": config.mask_token_id, "target_layer_ids": config.target_layer_ids}
    return {
        "architectures": ["DFlashDraftModel"],
        "block_size": config.block_size,
        "num_target_layers": num_target_layers,
        "dflash_config": about,
        "tie_word_embeddings": False,
        **_layers(drafter),
        **_causal(drafter),
    }


def _speculators(drafter: DFlashReference, num_target_layers: int) -> dict[str, Any]:
    config = drafter.config
    proposal = {"proposal_type": "greedy", "speculative_tokens": config.block_size - 1}
    return {
        "architectures": ["DFlashDraftModel"],
        "speculators_model_type": "dflash",
        "aux_hidden_state_layer_ids": [i + 1 for i in config.target_layer_ids],
        "mask_token_id": config.mask_token_id,
        "block_size": config.block_size,
        "transformer_layer_config": _layers(drafter),
        "speculators_config": {"algorithm": "dflash", "proposal_methods": [proposal]},
        **_causal(drafter),
    }


def make_counting_pair(folder: Path, head_folder: Path, *, vocab: int = 160, **sizes: Any) -> Path:
    """Write a model that counts on, and a drafter for it; return the model's folder."""
    own: Any = {"vocab": vocab, "hidden": _WIDTH, "heads": 2, "kv_heads": 1, "head_dim": _DIM}
    make_tiny_checkpoint(folder, **own, rope_theta=_THETA, seed=7, **sizes)
    weights = load_file(folder / "model.safetensors")
    for name, tensor in weights.items():
        if name.endswith("norm.weight"):
            tensor.fill_(1.0)
        elif name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor.zero_()
    codes = torch.randn(vocab, _DIM - 1, generator=torch.Generator().manual_seed(3))
    codes /= codes.norm(dim=1, keepdim=True)
    embedding = weights["model.embed_tokens.weight"]
    embedding.zero_()[:, 0] = 1.0
    embedding[:, _CODE] = codes
    weights["lm_head.weight"].zero_()[:, _COPY] = 2.0 * codes.roll(_FURTHER, dims=0)
    _look_back(weights, "model.layers.1.self_attn.", PERIOD - 1)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    _save_counting(folder, head_folder, mask_id=vocab - 1)
    return folder


def _look_back(weights: dict[str, Tensor], at: str, distance: int) -> None:
    """Let rows of a layer copy the code of what stands at a distance: all queries are one, and all
    keys another, before they are turned."""
    pairs = torch.arange(_DIM // 2) * 2 / _DIM
    angles, unit = distance * _THETA**-pairs, math.sqrt(2 / _WIDTH)  # of a normed row's constant
    query = torch.cat((angles.cos(), -angles.sin())).repeat(2)  # heads that do the same
    weights[f"{at}q_proj.weight"].zero_()[:, 0] = _SHARP * unit * query
    weights[f"{at}k_proj.weight"].zero_()[: _DIM // 2, 0] = _SHARP * unit
    one = torch.eye(_DIM - 1)
    weights[f"{at}v_proj.weight"].zero_()[: _DIM - 1, _CODE] = unit * one
    weights[f"{at}o_proj.weight"].zero_()[_COPY, : _DIM - 1] = one / 2
    weights[f"{at}o_proj.weight"][_COPY, _DIM:-1] = one / 2


def _save_counting(model: Path, folder: Path, mask_id: int) -> None:
    sizes = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": _DIM}
    rope = {"rope_type": "default", "rope_theta": _THETA}
    made = sizes_for(model, **sizes, rope_parameters=rope, rms_norm_eps=1e-6)
    drafter = DFlashReference(
        made, layer_types=KINDS[:1], block_size=16, mask_id=mask_id, target_layer_ids=(0,)
    )
    weights = drafter.module.state_dict()
    for name, tensor in weights.items():
        tensor.fill_(1.0) if tensor.dim() == 1 else tensor.zero_()
        if name.endswith(("q_norm.weight", "k_norm.weight")):
            tensor.fill_(_SHARP / math.sqrt(2))
    weights["encoder.fc.weight"].copy_(torch.eye(_WIDTH))
    _look_back(weights, "layers.0.self_attn.", PERIOD)
    save_drafter(folder, drafter, 2)
