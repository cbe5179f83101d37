"""Weights rounded while they are loaded: what a model computes with them, on one rank and two."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.checkpoints.deepseek import make_tiny_deepseek
from support.checkpoints.gpt_oss import make_tiny_gpt_oss
from support.checkpoints.hybrid import make_tiny_hybrid
from support.checkpoints.quantize import quantize, round_plain
from support.checkpoints.tiny import make_tiny_checkpoint
from support.parity.bench import CALM, Conditions
from support.parity.rank_trial import RankTrial, short_requests, tokens
from support.ranks.spawn import run_checkpoints
from support.ranks.tensor_parallel import run_steps
from surestep_common.errors import InvalidRequest
from surestep_kernels import load_kernels
from surestep_kernels.ops.linear import WeightFormat
from surestep_kernels.ops.rounding import INT4, INT8, ROUNDINGS
from surestep_kernels.step.step_ops import STEP_REFERENCE
from surestep_worker.distributed.tensor_parallel import TensorParallel
from surestep_worker.models import Model, ModelSource, load_model
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
    "glm-4": lambda path: make_tiny_deepseek(
        path, "glm4_moe", mtp=False, moe_intermediate_size=48
    ),
    "gpt-oss": lambda path: make_tiny_gpt_oss(path, intermediate_size=80),
}
CASES = [f"{name}+{rounding}" for name in SOURCES for rounding in ROUNDINGS]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Holds the sources, and the results of two ranks on each of them, rounded in every way."""
    path = tmp_path_factory.mktemp("rounded")
    for name, make in SOURCES.items():
        make(path / name)
    run_checkpoints(path, CASES)
    return path


def assert_near(actual: Tensor, expected: Tensor) -> None:
    assert expected.std() > 0.3, "logits too flat to tell right from wrong"
    # Added up in another order; hybrids with random weights make much of it at single tokens.
    assert (actual - expected).abs().max() < 1e-3 * expected.std()


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_the_weights_meant(folder: Path, case: str) -> None:
    name, _, rounding = case.partition("+")
    meant = run_steps(round_plain(folder / name, ROUNDINGS[rounding]), TensorParallel())["logits"]
    kernels: tuple[Literal["auto", "reference"], ...] = ("auto", "reference")
    for which in kernels:
        assert_near(run_steps(folder / case, TensorParallel(), which)["logits"], meant)
    plain = run_steps(folder / name, TensorParallel())["logits"]
    assert (meant - plain).abs().max() > 1e-2 * plain.std(), "nothing was rounded"


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_equal_one(folder: Path, case: str) -> None:
    alone = run_steps(folder / case, TensorParallel())["logits"]
    for rank in range(2):
        assert_near(torch.load(folder / f"rank{rank}.pt")[case]["logits"], alone)
