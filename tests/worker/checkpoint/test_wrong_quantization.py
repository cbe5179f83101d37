"""A quantised checkpoint whose config or tensors are wrong is refused, or means what it meant."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from support.checkpoints.compressed import PRESETS, compressed_twins, scheme
from support.checkpoints.damaged import change_config, change_tensors
from support.checkpoints.quantize import quantize
from support.checkpoints.tiny import make_tiny_checkpoint
from support.ranks.tensor_parallel import run_steps
from surestep_common.errors import InvalidRequest
from surestep_worker.distributed.tensor_parallel import TensorParallel
from torch import Tensor

FORMATS = ("fp8", "awq", "gptq", *PRESETS)
CHANGES = 12  # of each checkpoint


def made(folder: Path, form: str) -> Path:
    source = make_tiny_checkpoint(folder / "m", "qwen3", hidden=128, intermediate=256, layers=1)
    if form in PRESETS:
        return compressed_twins(source, {"": (scheme(form, 32), PRESETS[form])}).quantized
    return quantize(source, form, group_size=32).quantized


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
