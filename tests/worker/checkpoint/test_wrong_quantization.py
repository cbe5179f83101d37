"""A quantised checkpoint whose config or tensors are wrong is refused, or means what it meant."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.checkpoints.compressed import PRESETS, compressed_twins, scheme
from support.checkpoints.quantize import quantize
from support.checkpoints.tiny import make_tiny_checkpoint
from support.ranks.tensor_parallel import run_steps
from surestep_common.errors import InvalidRequest
from surestep_worker.distributed.tensor_parallel import TensorParallel
from torch import Tensor

FORMATS = ("fp8", "awq", "gptq", *PRESETS)
CHANGES = 12  # of each checkpoint
VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, 2, 3, 4, 8, 16, 32, 64, 128, -1, 7.5, "", "x", [], {}, [16, 16]),
    *("tensor", "channel", "group", "block", "tensor_group", "int", "float", "gptq_v2", "static"),
    *(form for form in set(PRESETS.values())),
)


def made(folder: Path, form: str) -> Path:
    source = make_tiny_checkpoint(folder / "m", "qwen3", hidden=128, intermediate=256, layers=1)
    if form in PRESETS:
        return compressed_twins(source, {"": (scheme(form, 32), PRESETS[form])}).quantized
    return quantize(source, form, group_size=32).quantized


def change_config(quantization: dict[str, Any], rng: random.Random) -> str:
    """One value, anywhere in it, is another one or missing."""
    places: list[tuple[dict[str, Any], str]] = []

    def walk(values: dict[str, Any]) -> None:
        for key, value in values.items():
            places.append((values, key))
            if isinstance(value, dict):
                walk(value)

    walk(quantization)
    values, key = rng.choice(places)
    if rng.random() < 0.3:
        return f"{key} missing: {values.pop(key)}"
    before, values[key] = values[key], rng.choice(VALUES)
    return f"{key}: {before} -> {values[key]}"


def twice(tensor: Tensor) -> Tensor:
    words = tensor.reshape(-1, *tensor.shape[1:]).view(torch.uint8)
    return torch.cat((words, words)).view(tensor.dtype)


TENSOR_CHANGES: dict[str, Callable[[Tensor], Tensor | None]] = {
    "missing": lambda tensor: None,
    "twice": twice,
    "half": lambda tensor: tensor[: len(tensor) // 2] if tensor.dim() else tensor[None, None],
    "16 bits": lambda tensor: tensor.half() if tensor.is_floating_point() else tensor.short(),
    "flat": lambda tensor: tensor.flatten(),
}


def change_tensors(tensors: dict[str, Tensor], rng: random.Random) -> str:
    """One tensor of a quantised module has another shape or type, or is missing."""
    name = rng.choice(sorted(name for name in tensors if "_proj" in name))
    how = rng.choice(sorted(TENSOR_CHANGES))
    changed = TENSOR_CHANGES[how](tensors.pop(name))
    if changed is not None:
        tensors[name] = changed.clone()
    return f"{name} {how}"


def logits(path: Path) -> Tensor:
    result: Tensor = run_steps(path, TensorParallel())["logits"]
    return result


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.rotates(4)
def test_wrong_is_refused_or_changes_nothing(tmp_path: Path, form: str, seed: int) -> None:
    path, rng = made(tmp_path, form), random.Random(f"{form} {seed}")
    meant, refused = logits(path), 0
    config = json.loads((path / "config.json").read_text())
    tensors = load_file(path / "model.safetensors")
    for _ in range(CHANGES):
        other, changed = json.loads(json.dumps(config)), dict(tensors)
        what = (
            change_config(other["quantization_config"], rng)
            if rng.random() < 0.6
            else change_tensors(changed, rng)
        )
        (path / "config.json").write_text(json.dumps(other))
        save_file(changed, path / "model.safetensors")
        try:
            found = logits(path)
        except InvalidRequest:
            refused += 1
        else:
            assert (found - meant).abs().max() < 1e-3 * meant.std(), what
    assert refused
