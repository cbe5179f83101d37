"""Weights that are no numbers: found before the first request, and named."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.checkpoints.hybrid import make_tiny_hybrid
from support.checkpoints.quantize import quantize
from support.checkpoints.tiny import make_tiny_checkpoint
from surestep_common.errors import InvalidRequest
from surestep_worker.config import WorkerSettings
from surestep_worker.startup.build import build_runner
from surestep_worker.startup.built import Built
from surestep_worker.startup.profile import output_is_finite

NAN, INF = float("nan"), float("inf")


def build(path: Path, **changes: object) -> Built:
    sizes = {"kv_cache_memory": 0.001, "snapshot_memory": 0.001, "max_num_seqs": 4}
    return build_runner(WorkerSettings.model_validate({"model": path, **sizes, **changes}))


def fp8(path: Path) -> Path:
    return quantize(make_tiny_hybrid(path / "source", "qwen3_5"), "fp8").quantized


MODELS: dict[str, Callable[[Path], Path]] = {
    "dense": lambda folder: make_tiny_checkpoint(folder / "m"),
    "tied": lambda folder: make_tiny_checkpoint(folder / "m", tie=True),
    "moe": lambda folder: make_tiny_hybrid(folder / "m", "qwen3_next"),
    "fp8": fp8,
}
CASES = [
    ("dense", "model.layers.1.mlp.up_proj.weight", NAN),
    ("dense", "model.layers.0.input_layernorm.weight", INF),
    ("dense", "model.norm.weight", NAN),
    ("dense", "lm_head.weight", NAN),
    ("tied", "model.embed_tokens.weight", NAN),
    ("moe", "model.layers.0.linear_attn.A_log", NAN),
    ("moe", "model.layers.3.self_attn.k_proj.weight", INF),
    ("moe", "model.layers.1.mlp.gate.weight", NAN),
    ("fp8", "model.layers.0.mlp.up_proj.weight_scale_inv", NAN),
]


def spoil(path: Path, name: str, value: float) -> None:
    weights = path / "model.safetensors"
    tensors = load_file(weights)
    tensors[name].view(-1)[0] = value
    save_file(tensors, weights, metadata={"format": "pt"})


@pytest.mark.parametrize(("model", "name", "value"), CASES)
def test_the_file_and_the_tensor_are_named(
    tmp_path: Path, model: str, name: str, value: float
) -> None:
    path = MODELS[model](tmp_path)
    spoil(path, name, value)
    with pytest.raises(InvalidRequest) as raised:
        build(path)
    found = f"{path / 'model.safetensors'}: 1 elements of {name} are NaN or infinite"
    assert str(raised.value) == f"the model's logits are not finite: {found}"


def test_weights_whose_products_overflow_are_told_apart(tmp_path: Path) -> None:
    path = make_tiny_checkpoint(tmp_path)
    weights = path / "model.safetensors"
    tensors = load_file(weights)
    tensors["model.layers.0.mlp.down_proj.weight"].fill_(3e38)
    save_file(tensors, weights, metadata={"format": "pt"})
    with pytest.raises(InvalidRequest, match="although every weight that could be read is"):
        build(path)


def test_few_tensors_are_named_of_many(tmp_path: Path) -> None:
    path = make_tiny_checkpoint(tmp_path)
    weights = path / "model.safetensors"
    tensors = {name: torch.full_like(t, NAN) for name, t in load_file(weights).items()}
    save_file(tensors, weights, metadata={"format": "pt"})
    with pytest.raises(InvalidRequest) as raised:
        build(path)
    assert str(raised.value).count("are NaN or infinite") == 3


@pytest.mark.parametrize(
    "sizes", [{}, {"max_model_len": 2}, {"max_num_seqs": 1}, {"block_size": 8}]
)
@pytest.mark.parametrize("tokens", [2, 7, 64])
def test_any_size_leaves_room_to_look(tmp_path: Path, sizes: dict[str, int], tokens: int) -> None:
    path = make_tiny_checkpoint(tmp_path, layers=1)
    built = build(path, max_num_batched_tokens=tokens, **sizes)
    assert output_is_finite(built.runner)
    spoiled = make_tiny_checkpoint(tmp_path / "spoiled", layers=1)
    spoil(spoiled, "model.norm.weight", NAN)
    with pytest.raises(InvalidRequest, match=r"model\.norm\.weight"):
        build(spoiled, max_num_batched_tokens=tokens, **sizes)


def test_weights_that_are_read_anew_are_looked_at_anew(tmp_path: Path) -> None:
    """Whatever a rank before has seen: the file may be another one."""
    path = make_tiny_checkpoint(tmp_path)
    seen = build(path).profile_result
    spoil(path, "model.norm.weight", NAN)
    settings = {"model": path, "kv_cache_memory": 0.001, "max_num_seqs": 4}
    with pytest.raises(InvalidRequest, match=r"model\.norm\.weight"):
        build_runner(WorkerSettings.model_validate(settings), profile_result=seen)


def test_the_fingerprint_tells_of_the_kind_of_numbers(tmp_path: Path) -> None:
    path = make_tiny_checkpoint(tmp_path)
    plain, narrow = build(path).facts, build(path, dtype="bfloat16").facts
    assert plain.model_fingerprint.endswith("-float32-float32")
    assert narrow.model_fingerprint.endswith("-bfloat16-bfloat16")
    assert plain.model_fingerprint.partition("-")[0] == narrow.model_fingerprint.partition("-")[0]
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"rope_theta": 5.0}))
    other = build(path).facts.model_fingerprint
    assert other.partition("-")[0] != plain.model_fingerprint.partition("-")[0]
