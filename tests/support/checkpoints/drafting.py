"""Models that draft for a tiny one, made of its own weights, and a head beside it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from support.checkpoints.tiny import make_tiny_checkpoint

_WEIGHTS = "model.safetensors"


def keep_last_layer(folder: Path, draft: Path) -> Path:
    """Write the last layer of a dense model as a model of its own."""
    config = json.loads((folder / "config.json").read_text())
    last = config["num_hidden_layers"] - 1
    kept = {
        name.replace(f"layers.{last}.", "layers.0."): tensor
        for name, tensor in load_file(folder / _WEIGHTS).items()
        if ".layers." not in name or f".layers.{last}." in name
    }
    draft.mkdir()
    (draft / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1}))
    save_file(kept, draft / _WEIGHTS, metadata={"format": "pt"})
    return draft


def add_noise(folder: Path, draft: Path, share: float) -> Path:
    """Write a model with noise on every weight, a share of what that is as a whole."""
    shutil.copytree(folder, draft)
    rng = torch.Generator().manual_seed(3)
    weights = {
        name: tensor + share * tensor.std() * torch.randn(tensor.shape, generator=rng)
        for name, tensor in load_file(folder / _WEIGHTS).items()
    }
    save_file(weights, draft / _WEIGHTS, metadata={"format": "pt"})
    return draft


class MtpNames(NamedTuple):
    """Names of the tensors of an MTP head in a checkpoint."""

    layer: str  # begins those of its layer
    joins: str
    norm_embedding: str
    norm_hidden: str
    norm: str


_MIMO = "model.mtp_layers.0."
MTP_NAMES = {
    "mimo": MtpNames(
        layer=_MIMO,
        joins=f"{_MIMO}input_proj.weight",
        norm_embedding=f"{_MIMO}token_layernorm.weight",
        norm_hidden=f"{_MIMO}hidden_layernorm.weight",
        norm=f"{_MIMO}final_layernorm.weight",
    ),
    "ernie4_5_moe": MtpNames(
        layer="model.mtp_block.0.",
        joins="model.mtp_linear_proj.0.weight",
        norm_embedding="model.mtp_emb_norm.0.weight",
        norm_hidden="model.mtp_hidden_norm.0.weight",
        norm="model.norm.weight",
    ),
}
_EXPERTS: dict[str, Any] = {
    "moe_num_experts": 4,
    "moe_k": 2,
    "moe_intermediate_size": 24,
    "moe_num_shared_experts": 1,
    "moe_layer_start_index": 1,
}


def make_tiny_mtp(folder: Path, kind: str, **sizes: Any) -> Path:
    """Write a Qwen2 with the MTP head of a MiMo, or an Ernie 4.5 with its own, whose layer has the
    shapes of the first."""
    names, mimo = MTP_NAMES[kind], kind == "mimo"
    make_tiny_checkpoint(folder, "qwen2" if mimo else kind, **sizes, **({} if mimo else _EXPERTS))
    config, weights = json.loads((folder / "config.json").read_text()), load_file(folder / _WEIGHTS)
    width, first = config["hidden_size"], "model.layers.0."
    shapes = {n.replace(first, names.layer): x.shape for n, x in weights.items() if first in n}
    shapes |= dict.fromkeys(names[2:], torch.Size((width,)))
    shapes[names.joins] = torch.Size((width, 2 * width))
    for name in sorted(shapes.keys() - weights.keys()):
        weights[name] = torch.randn(shapes[name]) * 0.2 + name.endswith("norm.weight")
    config["num_nextn_predict_layers"] = 1
    if mimo:
        config |= {"architectures": ["MiMoForCausalLM"], "model_type": kind}
    (folder / "config.json").write_text(json.dumps(config))
    save_file(weights, folder / _WEIGHTS, metadata={"format": "pt"})
    return folder
