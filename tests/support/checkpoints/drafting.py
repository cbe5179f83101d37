"""Models that draft for a tiny one, made of its own weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

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
