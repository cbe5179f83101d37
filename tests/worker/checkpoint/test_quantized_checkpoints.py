"""Quantised checkpoints run like the weights they stand for, on one rank and on two."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.checkpoints.deepseek import make_tiny_deepseek
from support.checkpoints.hybrid import make_tiny_hybrid
from support.checkpoints.quantize import METHODS, Twins, fp8, quantize
from support.checkpoints.tiny import make_tiny_checkpoint
from support.parity.stepping import Row, pack
from support.ranks.spawn import run_checkpoints
from support.ranks.tensor_parallel import run_steps
from surestep_common.errors import InvalidRequest
from surestep_kernels import load_kernels
from surestep_worker.cache.caches import Caches
from surestep_worker.cache.kv_cache import KVCache
from surestep_worker.distributed.tensor_parallel import TensorParallel
from surestep_worker.models import Model, ModelSource, load_model
from torch import Tensor

# What published checkpoints leave plain.
SMALL = ("in_proj_a", "in_proj_b", "in_proj_ba", "gate", "shared_expert_gate", "weights_proj")
SOURCES: dict[str, Callable[[Path], Path]] = {
    "llama": lambda path: make_tiny_checkpoint(path, hidden=192, intermediate=320, heads=6),
    "qwen2": lambda path: make_tiny_checkpoint(path, "qwen2", hidden=64, heads=4, kv_heads=1),
    "qwen3": lambda path: make_tiny_checkpoint(path, "qwen3", head_dim=24, tie=True),
    "hybrid": lambda path: make_tiny_hybrid(path, linear_value_head_dim=24),
    "hybrid-moe": lambda path: make_tiny_hybrid(
        path, "qwen3_next", moe_intermediate_size=32, shared_expert_intermediate_size=32
    ),
    "mixtral": lambda path: make_tiny_checkpoint(
        path, "mixtral", intermediate=64, num_local_experts=4
    ),
    "phi3": lambda path: make_tiny_checkpoint(path, "phi3", hidden=192, heads=6, kv_heads=2),
    "glm-5": lambda path: make_tiny_deepseek(
        path, "glm_moe_dsa", mtp=False, intermediate_size=64, moe_intermediate_size=32
    ),
}
Q_PROJ = "model.layers.0.self_attn.q_proj"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("quantized")


@pytest.fixture(scope="module")
def twins(folder: Path) -> dict[str, Twins]:
    """Of all sources and methods, with the results of two ranks left in `folder`."""
    made = {}
    for name, make in SOURCES.items():
        source = make(folder / name)
        plain = SMALL if name.startswith(("hybrid", "mixtral", "glm")) else ("model.layers.1.mlp",)
        for method in METHODS:
            made[f"{name}-{method}"] = quantize(source, method, plain=plain, group_size=16)
    run_checkpoints(folder, [path.name for pair in made.values() for path in pair])
    return made


CASES = [f"{name}-{method}" for name in SOURCES for method in METHODS]


def assert_near(actual: Tensor, expected: Tensor) -> None:
    assert expected.std() > 0.3, "logits too flat to tell right from wrong"
    # Rounding in another order; hybrids with random weights make much of it at single tokens.
    assert (actual - expected).abs().max() < 5e-4 * expected.std()


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kernels", ["auto", "reference"])
@pytest.mark.rotates(2)
def test_logits_are_those_of_the_weights_meant(
    twins: dict[str, Twins], case: str, kernels: Literal["auto", "reference"]
) -> None:
    results = [run_steps(path, TensorParallel(), kernels) for path in twins[case]]
    assert_near(*(result["logits"] for result in results))


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_equal_one(folder: Path, twins: dict[str, Twins], case: str) -> None:
    alone = run_steps(twins[case].plain, TensorParallel())["logits"]
    for rank in range(2):
        results = torch.load(folder / f"rank{rank}.pt")
        assert_near(results[twins[case].quantized.name]["logits"], alone)
        assert_near(results[twins[case].plain.name]["logits"], alone)


def load(path: Path, *, mtp: bool = False) -> Model:
    return load_model(
        ModelSource(path),
        dtype="auto",
        device="cpu",
        tp=TensorParallel(),
        kernels=load_kernels("cpu"),
        draft_head=mtp,
    )


@torch.inference_mode()
def mtp_logits(path: Path) -> Tensor:
    """Of the MTP head after a prompt of random hidden states."""
    model = load(path, mtp=True)
    assert model.draft_head is not None
    kv = KVCache(model.kv_spec(8), 4, load_kernels("cpu"), "cpu")
    ids = list(range(40, 52))
    hidden = torch.randn(len(ids), 32, generator=torch.Generator().manual_seed(1))
    batch = pack([Row(ids, 0, (3, 1))], 8)
    return model.logits(model.draft_head.forward(hidden, batch, Caches(kv)))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("listed", [None, ()], ids=["listed", "not listed"])
@pytest.mark.parametrize("plain", ["mtp", "mtp.fc"])
def test_an_mtp_head_may_be_plain_quantised_or_both(
    tmp_path: Path, method: str, plain: str, listed: tuple[str, ...] | None
) -> None:
    source = make_tiny_hybrid(tmp_path / "hybrid", "qwen3_5")
    twins = quantize(source, method, plain=(plain, *SMALL), listed=listed)
    assert_near(*(mtp_logits(path) for path in twins))


def test_an_output_head_may_be_quantised(tmp_path: Path) -> None:
    twins = quantize(make_tiny_checkpoint(tmp_path / "source", hidden=128), "fp8")
    files = [folder / "model.safetensors" for folder in twins]
    stored, meant = (load_file(file) for file in files)
    head = fp8(meant["lm_head.weight"])
    stored |= {f"lm_head.{suffix}": part for suffix, part in head.stored.items()}
    meant["lm_head.weight"] = head.meaning
    for tensors, file in zip((stored, meant), files, strict=True):
        save_file(tensors, file)
    assert_near(*(run_steps(folder, TensorParallel())["logits"] for folder in twins))


@pytest.mark.parametrize(("method", "bytes_each"), [("fp8", 1 + 4 / 128), ("awq", 0.5 + 4 / 16)])
def test_a_model_counts_packed_bytes(tmp_path: Path, method: str, bytes_each: float) -> None:
    source = make_tiny_checkpoint(tmp_path / "source", hidden=128, intermediate=256)
    twins = quantize(source, method)
    weights = load_file(twins.plain / "model.safetensors")
    linear = sum(t.numel() for name, t in weights.items() if "_proj" in name)
    rest = sum(t.nbytes for name, t in weights.items() if "_proj" not in name)
    assert load(twins.quantized).weight_bytes == rest + linear * bytes_each


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return make_tiny_checkpoint(tmp_path / "source", "qwen3", layers=1)


Change = Callable[[dict[str, Tensor]], object]


@pytest.mark.parametrize(
    ("method", "change", "message"),
    [
        (
            "fp8",
            lambda t: t.pop(f"{Q_PROJ}.weight_scale_inv"),
            rf"missing: {Q_PROJ}\.weight_scale_inv$",
        ),
        ("fp8", lambda t: t.pop(f"{Q_PROJ}.weight"), rf"missing: {Q_PROJ}\.weight$"),
        (
            "fp8",
            lambda t: t.update({f"{Q_PROJ}.weight_scale_inv": torch.ones(2, 1)}),
            rf"of another shape: {Q_PROJ}\.weight_scale_inv \[2, 1\] instead of \[1, 1\]$",
        ),
        (
            "fp8",
            lambda t: t.update({f"{Q_PROJ}.weight": t[f"{Q_PROJ}.weight"].bfloat16()}),
            rf"of another type: {Q_PROJ}\.weight BF16 instead of F8_E4M3$",
        ),
        (
            "fp8",
            lambda t: t.update({"lm_head.weight_scale_inv": torch.ones(3, 1)}),
            r"of another type: lm_head\.weight F32 instead of F8_E4M3$",
        ),
        (
            "fp8",
            lambda t: t.update({"lm_head.weight": t["lm_head.weight"].to(torch.float8_e4m3fn)}),
            r"missing: lm_head\.weight_scale_inv$",
        ),
        ("awq", lambda t: t.pop(f"{Q_PROJ}.qzeros"), rf"missing: {Q_PROJ}\.qzeros$"),
        (
            "awq",
            lambda t: t.update({f"{Q_PROJ}.weight": torch.zeros(64, 64)}),
            rf"unexpected: {Q_PROJ}\.weight$",
        ),
        (
            "awq",
            lambda t: t.update({f"{Q_PROJ}.scales": t[f"{Q_PROJ}.scales"].float()}),
            rf"of another type: {Q_PROJ}\.scales F32 instead of F16 or BF16$",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_refused(
    source: Path, method: str, change: Change, message: str
) -> None:
    path = quantize(source, method).quantized
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(InvalidRequest, match=message):
        load(path)


def test_a_checkpoint_of_gptq(source: Path) -> None:
    """What else it shares with AWQ is tested there."""
    twins = quantize(source, "gptq", plain=("down_proj",))
    assert_near(*(run_steps(path, TensorParallel())["logits"] for path in twins))


@pytest.mark.parametrize("method", METHODS)
def test_the_list_must_not_contradict_the_tensors(source: Path, method: str) -> None:
    path = quantize(source, method, listed=["layers.0.mlp", "self_attn.q"]).quantized
    names = ", ".join(f"model.layers.0.mlp.{name}_proj" for name in ("down", "gate", "up"))
    message = f"quantized although listed in modules_to_not_convert: {names}$"
    with pytest.raises(InvalidRequest, match=message):
        load(path)


@pytest.mark.parametrize("method", METHODS)
def test_merged_projections_are_quantised_together(source: Path, method: str) -> None:
    path = quantize(source, method, plain=["q_proj"]).quantized
    with pytest.raises(InvalidRequest, match=rf"plain beside quantized .*: {Q_PROJ}\.weight$"):
        load(path)


@pytest.mark.parametrize("method", METHODS)
def test_quantised_tensors_need_a_scheme(source: Path, method: str) -> None:
    path = quantize(source, method).quantized
    config = json.loads((path / "config.json").read_text())
    del config["quantization_config"]
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(InvalidRequest, match=r"unexpected: model\.layers\.0\.mlp\.down_proj"):
        load(path)
