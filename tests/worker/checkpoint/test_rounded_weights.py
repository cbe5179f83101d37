"""Weights rounded while they are loaded: what a model computes with them, on one rank and two."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.checkpoints.deepseek import make_tiny_deepseek
from support.checkpoints.gpt_oss import make_tiny_gpt_oss
from support.checkpoints.hybrid import make_tiny_hybrid
from support.checkpoints.quantize import quantize, round_plain
from support.checkpoints.tiny import make_tiny_checkpoint
from support.parity.bench import CALM, Conditions, make_model, total
from support.parity.rank_trial import RankTrial, short_requests, tokens
from support.ranks.spawn import run_checkpoints
from support.ranks.tensor_parallel import run_steps
from surestep_common.errors import InvalidRequest
from surestep_kernels import load_kernels
from surestep_kernels.linear import ROUNDINGS
from surestep_kernels.table import STEP_REFERENCE
from surestep_worker.distributed.tensor_parallel import TensorParallel
from surestep_worker.models import ModelSource, load_model
from torch import Tensor

# Two ranks cut most of these between the borders of groups of 32 and of 128.
SOURCES: dict[str, Callable[[Path], Path]] = {
    "llama": lambda path: make_tiny_checkpoint(path, mlp_bias=True, vocab=385),
    "qwen2": lambda path: make_tiny_checkpoint(path, "qwen2", kv_heads=1, intermediate=176),
    "qwen3-tied": lambda path: make_tiny_checkpoint(path, "qwen3", head_dim=24, tie=True),
    "hybrid": lambda path: make_tiny_hybrid(path, linear_value_head_dim=24),
    "hybrid-moe": lambda path: make_tiny_hybrid(path, "qwen3_next", moe_intermediate_size=48),
    "hybrid-fused-moe": lambda path: make_tiny_hybrid(
        path, "qwen3_5_moe", moe_intermediate_size=48
    ),
    "glm-5": lambda path: make_tiny_deepseek(
        path, "glm_moe_dsa", mtp=False, moe_intermediate_size=48
    ),
    "glm-4": lambda path: make_tiny_deepseek(path, "glm4_moe", mtp=False, moe_intermediate_size=48),
    "gpt-oss": lambda path: make_tiny_gpt_oss(path, intermediate_size=80),
}
pytestmark = pytest.mark.rotates(1, turn=0)
CASES = [f"{name}+{rounding}" for name in SOURCES for rounding in ROUNDINGS]
# Two ranks take a second for each; that their weights are those of one is for a unit test.
ON_TWO_RANKS = [case for i, case in enumerate(CASES) if i % 4 == 0 or case == "llama+int8"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Holds the sources, and the results of two ranks on each of them, rounded in every way."""
    path = tmp_path_factory.mktemp("rounded")
    for name, make in SOURCES.items():
        make(path / name)
    run_checkpoints(path, ON_TWO_RANKS)
    return path


def assert_near(actual: Tensor, expected: Tensor) -> None:
    assert expected.std() > 0.3, "logits too flat to tell right from wrong"
    # Added up in another order; hybrids with random weights make much of it at single tokens.
    assert (actual - expected).abs().max() < 1e-3 * expected.std()


@pytest.mark.rotates(3, always=("llama", "int4"))
@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_the_weights_meant(folder: Path, case: str) -> None:
    name, _, rounding = case.partition("+")
    meant = run_steps(round_plain(folder / name, ROUNDINGS[rounding]), TensorParallel())["logits"]
    assert_near(run_steps(folder / case, TensorParallel())["logits"], meant)
    plain = run_steps(folder / name, TensorParallel())["logits"]
    assert (meant - plain).abs().max() > 1e-2 * plain.std(), "nothing was rounded"


@pytest.mark.parametrize("case", ON_TWO_RANKS)
def test_two_ranks_equal_one(folder: Path, case: str) -> None:
    alone = run_steps(folder / case, TensorParallel())["logits"]
    for rank in range(2):
        assert_near(torch.load(folder / f"rank{rank}.pt")[case]["logits"], alone)


RANK = RankTrial(short_requests(5, (0.0, 0.0, 0.7)), {})


@pytest.mark.parametrize(
    ("rounding", "dtype", "where", "drafter", "depth", "conditions"),
    [
        ("int8", "float32", "mixed", "oracle", 1, CALM),
        ("int4", "bfloat16", "preempted", "ragged", 2, Conditions(step_ops=STEP_REFERENCE)),
        ("fp8", "bfloat16", "mixed", "oracle", 2, CALM),
    ],
)
def test_speculation_changes_no_token(
    tmp_path: Path,
    rounding: str,
    dtype: str,
    where: str,
    drafter: str,
    depth: int,
    conditions: Conditions,
) -> None:
    settings: dict[str, Any] = {"quantization": rounding, "dtype": dtype}
    make_model(tmp_path)
    alone = RANK.answers(tmp_path, "alone", "none", 0, **settings)
    RANK.drafts_change_nothing(tmp_path, alone, where, drafter, depth, conditions, **settings)
    plain = RANK.answers(tmp_path, "alone", "none", 0, dtype=dtype)
    assert tokens(plain) != tokens(alone), "nothing was rounded"


@pytest.mark.parametrize("rounding", ["int8", "int4"])
def test_an_mtp_head_is_rounded_with_its_model(folder: Path, rounding: str) -> None:
    settings: dict[str, Any] = {"quantization": rounding}
    alone = RANK.answers(folder / "hybrid", "alone", "none", 0, **settings)
    found = RANK.answers(folder / "hybrid", "mixed", "mtp", 1, **settings)
    assert tokens(found) == tokens(alone)
    assert total(found, "num_drafts") > 0


def test_ranks_and_successors_tell_by_the_name(tmp_path: Path) -> None:
    make_model(tmp_path)
    """The scheduler compares these: a rank that rounds otherwise serves another model."""
    names = [
        RANK.build(tmp_path, quantization=wanted).facts.model_fingerprint
        for wanted in (None, "INT8", "int4", "fp8")
    ]
    assert names[1:] == [f"{names[0]}-{wanted}_weights" for wanted in ("int8", "int4", "fp8")]


def test_what_is_quantised_already_is_not_rounded(folder: Path) -> None:
    awq = quantize(make_tiny_checkpoint(folder / "source", hidden=128), "awq").quantized
    with pytest.raises(InvalidRequest, match="quantised by 'awq'") as raised:
        RANK.build(awq, quantization="int8")
    assert raised.value.param == "quantization"
    held = RANK.build(awq, quantization="awq_marlin").facts.model_fingerprint
    assert held == RANK.build(awq).facts.model_fingerprint


@pytest.mark.parametrize(
    ("name", "bits", "head"), [("int8", 9, 9), ("int4", 5, 9), ("fp8", 8.25, 32)]
)
def test_a_model_counts_packed_bytes(folder: Path, name: str, bits: float, head: float) -> None:
    path = make_tiny_checkpoint(folder / f"sized-{name}", hidden=128, intermediate=256)
    model = load_model(
        ModelSource(path),
        dtype="auto",
        device="cpu",
        tp=TensorParallel(),
        kernels=load_kernels("cpu"),
        rounding=ROUNDINGS[name],
    )
    sizes = {n: tensor.numel() for n, tensor in load_file(path / "model.safetensors").items()}
    small = sum(size for n, size in sizes.items() if "norm" in n)
    embedding = sizes["model.embed_tokens.weight"]
    assert embedding == sizes["lm_head.weight"]
    layers = sum(sizes.values()) - small - 2 * embedding
    exact = 4 * (small + embedding)
    assert model.weight_bytes == exact + (layers * bits + embedding * head) / 8


def test_one_number_that_is_none_is_named(folder: Path) -> None:
    path = make_tiny_checkpoint(folder / "broken")
    tensors = load_file(path / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][3, 4] = torch.inf
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(InvalidRequest, match=r"model\.layers\.1\.mlp\.up_proj cannot be rounded"):
        RANK.build(path, quantization="int4")
