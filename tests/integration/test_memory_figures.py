"""What benchmarks/memory.py computes is what the worker allocates by."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path

import latents
import pytest
import torch
from kv_windows import request_bytes
from memory import Sizes, figures, of_folder
from safetensors.torch import load_file
from support.checkpoints.deepseek import make_tiny_deepseek
from support.checkpoints.gpt_oss import WINDOW, make_tiny_gpt_oss
from support.checkpoints.tiny import make_tiny_checkpoint
from surestep_kernels import load_kernels
from surestep_worker.cache.kv_cache import bytes_per_block
from surestep_worker.distributed.tensor_parallel import TensorParallel
from surestep_worker.models import Model, ModelSource, load_model

HYBRID = Path(__file__).parents[1] / "data" / "tiny-hybrid"


def loaded(folder: Path, *, mtp: bool) -> Model:
    return load_model(
        ModelSource(folder),
        dtype="auto",
        device="cpu",
        tp=TensorParallel(),
        kernels=load_kernels("cpu", "reference"),
        draft_head=mtp,
    )


@pytest.mark.parametrize("mtp", [False, True])
def test_a_hybrid_takes_what_is_computed(mtp: bool) -> None:
    model, sizes = loaded(HYBRID, mtp=mtp), of_folder(HYBRID, mtp=mtp)
    assert sizes.kv_spec(1, None) == model.kv_spec(16)
    assert sizes.recurrent == model.recurrent_spec()


def test_a_dense_model_takes_what_is_computed(tmp_path: Path) -> None:
    folder = make_tiny_checkpoint(tmp_path, dtype=torch.bfloat16)
    sizes = of_folder(folder, mtp=True)
    assert sizes.kv_spec(1, None) == loaded(folder, mtp=False).kv_spec(16)
    assert sizes.recurrent is None
    tensors = load_file(folder / "model.safetensors").values()
    assert sizes.weight_bytes == sum(tensor.nbytes for tensor in tensors)


def test_layers_with_windows_take_what_is_computed(tmp_path: Path) -> None:
    folder = make_tiny_gpt_oss(tmp_path)
    sizes, model = of_folder(folder, mtp=False), loaded(folder, mtp=False)
    spec = model.kv_spec(16)
    assert sizes.kv_spec(1, None) == spec
    assert spec.layout.windows == (0, WINDOW)
    kernels = load_kernels("cpu", "reference")
    whole = bytes_per_block(replace(spec, windows=(0,) * 4), kernels)
    assert 2 * bytes_per_block(spec, kernels) == whole  # two layers in each group
    kept = request_bytes(spec, kernels, 160, 1)
    assert kept == (10 + 2) * whole // 2  # the window of 8 lies in two blocks of 16


@pytest.mark.parametrize("mtp", [False, True])
def test_latents_take_what_is_computed(tmp_path: Path, mtp: bool) -> None:
    folder = make_tiny_deepseek(tmp_path, "glm_moe_dsa")
    spec = loaded(folder, mtp=mtp).kv_spec(16)
    assert of_folder(folder, mtp=mtp).kv_spec(1, None) == spec
    kept = 4 * 48 + 3 * 32 + mtp * (48 + 32 + 64)  # latents, index keys; those of the MTP layer
    assert bytes_per_block(spec, load_kernels("cpu", "reference")) == 16 * 4 * kept


def test_figures_of_latents(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """GLM-5.1's in bfloat16; and decode steps of the same model, dense and sparse, are timed."""
    glm = latents.bytes_of_a_token(latents.MODELS["glm_moe_dsa (GLM-5.1)"])
    assert (glm["latents"], glm["index_keys"]) == (89_856, 19_968)
    make_tiny_deepseek(tmp_path, "glm_moe_dsa", num_hidden_layers=2)
    given = argparse.Namespace(folder=tmp_path, contexts=[9, 40], rounds=1, threads=1)
    latents.time_steps(given)
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["context"] for line in lines] == [9, 40]
    assert min(lines[0]["ms"].values()) > 0


def test_requests_are_those_whose_tokens_have_room() -> None:
    sizes = Sizes(8 << 30, (0, 0), 4, 64, 0, torch.bfloat16, None)  # 2 KiB a token
    found = figures(sizes, 2, 4 + 2 / 0.85, 0, fp8=False)  # two ranks: half of all
    assert found["weights_gib"] == 4
    assert found["kv_kib_per_token"] == 1
    assert found["caches_gib"] == 2
    assert found["requests"] == {1024: 2048, 4096: 512, 32768: 64}
    assert figures(sizes, 2, 4 + 2 / 0.85, 0, fp8=True)["kv_kib_per_token"] == 0.5
    assert figures(sizes, 1, 4, 0, fp8=False)["requests"] == {1024: 0, 4096: 0, 32768: 0}
