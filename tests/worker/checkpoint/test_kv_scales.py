"""Scales of keys and values in a checkpoint are what FP8 pages are divided by."""

from __future__ import annotations

import logging
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.checkpoints.hybrid import make_tiny_hybrid
from support.checkpoints.tiny import make_tiny_checkpoint
from support.parity.stepping import Row, in_one_group, pack
from surestep_common.errors import InvalidRequest
from surestep_kernels import load_kernels
from surestep_kernels.store_kv import FP8
from surestep_worker.cache.caches import Caches
from surestep_worker.cache.kv_cache import KVCache
from surestep_worker.checkpoint.kv_scales import kv_scale_table
from surestep_worker.checkpoint.safetensors_header import Entry
from surestep_worker.distributed.tensor_parallel import TensorParallel
from surestep_worker.models import Model, ModelSource, load_model
from torch import Tensor

KEYS, VALUES = 2.0**10, 2.0**12
OF_VLLM = {"k": "self_attn.attn.k_scale", "v": "self_attn.attn.v_scale"}
NAMES = {
    "vllm": OF_VLLM,
    "llm-compressor": {"k": "self_attn.k_scale", "v": "self_attn.v_scale"},
    "modelopt": {"k": "self_attn.k_proj.k_scale", "v": "self_attn.v_proj.v_scale"},
    "before": {"k": "self_attn.k_proj.output_scale", "v": "self_attn.v_proj.output_scale"},
}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_checkpoint(tmp_path_factory.mktemp("kv") / "m", "llama")


def with_tensors(source: Path, to: Path, changed: dict[str, Tensor]) -> Path:
    to.mkdir()
    for path in source.iterdir():
        (to / path.name).write_bytes(path.read_bytes())
    save_file({**load_file(source / "model.safetensors"), **changed}, to / "model.safetensors")
    return to


def louder(source: Path) -> dict[str, Tensor]:
    """The same model with larger keys and values, and smaller queries and outputs."""
    factors = {"k_proj": KEYS, "q_proj": 1 / KEYS, "v_proj": VALUES, "o_proj": 1 / VALUES}
    return {
        name: tensor * factor
        for name, tensor in load_file(source / "model.safetensors").items()
        for part, factor in factors.items()
        if part in name
    }


def scales(names: dict[str, str], k: float = KEYS, v: float = VALUES) -> dict[str, Tensor]:
    each = {"k": k, "v": v}
    return {
        f"model.layers.{layer}.{name}": torch.tensor(each[which])
        for layer in range(2)
        for which, name in names.items()
    }


def load(path: Path, implementation: str = "surestep") -> Model:
    return load_model(
        ModelSource(path, implementation=implementation),
        dtype="auto",
        device="cpu",
        tp=TensorParallel(),
        kernels=load_kernels("cpu"),
    )


@torch.inference_mode()
def logits(model: Model, cache_dtype: torch.dtype | None = FP8) -> Tensor:
    spec = replace(in_one_group(model.kv_spec(8)), cache_dtype=cache_dtype)
    caches = Caches(KVCache(spec, 5, load_kernels("cpu"), "cpu"))
    steps = [Row([*range(40, 52)], 0, (3, 1))], [Row([7, 9], 12, (3, 1), window=True)]
    return torch.cat([model.logits(model.forward(pack(rows, 8), caches)) for rows in steps])


@pytest.mark.parametrize("implementation", ["surestep", "transformers"])
@pytest.mark.parametrize("names", NAMES)
def test_scales_are_used(source: Path, tmp_path: Path, names: str, implementation: str) -> None:
    """Powers of two change no bit: a model with larger keys and values is the same model."""
    made = {**louder(source), **scales(NAMES[names])}
    model = load(with_tensors(source, tmp_path / "m", made), implementation)
    assert model.kv_spec(8).scales == ((KEYS, VALUES),) * 2
    assert torch.equal(logits(model), logits(load(source, implementation)))


def test_without_them_pages_saturate(source: Path, tmp_path: Path) -> None:
    model = load(with_tensors(source, tmp_path / "m", louder(source)))
    assert not torch.equal(logits(model), logits(load(source)))


def test_pages_that_are_not_fp8_need_none(source: Path, tmp_path: Path) -> None:
    model = load(with_tensors(source, tmp_path / "m", scales(OF_VLLM)))
    assert torch.equal(logits(model, None), logits(load(source), None))


@pytest.mark.parametrize("wrong", [0.0, -1.0, float("nan"), float("inf")])
def test_a_scale_that_is_none_is_refused(source: Path, tmp_path: Path, wrong: float) -> None:
    path = with_tensors(source, tmp_path / "m", scales(OF_VLLM, v=wrong))
    with pytest.raises(InvalidRequest, match=r"kv_scales\.0\.v: .* not a positive number"):
        load(path)


def test_a_layer_without_keys_needs_none(tmp_path: Path) -> None:
    """The first layer of this hybrid is recurrent, the last one attends."""
    source = make_tiny_hybrid(tmp_path / "source", "qwen3_5", mtp=False)
    names = [name for name in load_file(source / "model.safetensors") if ".k_proj.weight" in name]
    last = names[-1].removesuffix("k_proj.weight")
    first = re.sub(r"layers\.\d+", "layers.0", last)
    made = {f"{first}k_scale": torch.tensor(3.0), f"{last}v_scale": torch.tensor(2.0)}
    scales = load(with_tensors(source, tmp_path / "m", made)).kv_spec(8).scales
    assert scales == ((1.0, 1.0),) * (len(names) - 1) + ((1.0, 2.0),)


def test_others_are_told_or_of_no_layer(caplog: pytest.LogCaptureFixture) -> None:
    """Scales of single heads, those of an MTP layer, and of a vision tower."""
    names = {
        "model.layers.0.self_attn.k_scale": (4,),
        "model.layers.2.self_attn.k_scale": (1,),
        "visual.layers.0.self_attn.k_scale": (1,),
        "mtp.layers.0.self_attn.k_scale": (1,),
    }
    entries = {name: Entry(Path(), "F32", shape, 0, 4) for name, shape in names.items()}
    with caplog.at_level(logging.INFO):
        assert not kv_scale_table(entries, 2)
    assert "1 scales as model.layers.0.self_attn.k_scale are not used" in caplog.text
