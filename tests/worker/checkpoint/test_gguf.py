"""GGUF files run like the weights they stand for, packed, on one rank and on two."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from gguf import GGMLQuantizationType as Type
from support.checkpoints.gguf_files import BLOCKS, write_gguf
from support.checkpoints.quantize import Twins
from support.checkpoints.tiny import make_tiny_checkpoint
from support.processes.stack import own_cache
from support.ranks.spawn import run_checkpoints
from support.ranks.tensor_parallel import run_steps
from surestep_kernels import load_kernels
from surestep_worker.checkpoint.model_folder import read_entries
from surestep_worker.distributed.tensor_parallel import TensorParallel
from torch import Tensor

pytestmark = pytest.mark.timeout(600)  # the first test waits for all files on two ranks

HIDDEN = 256


def sized(path: Path, family: str, **config: Any) -> Path:
    sizes = {"hidden": HIDDEN, "intermediate": 512, "heads": 4, "kv_heads": 2, "layers": 1}
    return make_tiny_checkpoint(path, family, **{**sizes, **config})


def mixed(name: str) -> Type:
    """What a "Q4_K_M" file does, and a plain matrix among packed ones that it is merged with."""
    parts = {
        "v_proj": Type.Q6_K,
        "down_proj": Type.Q6_K,
        "embed_tokens": Type.Q6_K,
        "up_proj": Type.F16,
    }
    return parts.get(name.split(".")[-2], Type.Q4_K)


def all_of(kind: Type) -> Callable[[str], Type]:
    return lambda name: kind


EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
GEMMA = {"query_pre_attn_scalar": 64, "sliding_window": 6, "final_logit_softcapping": 30.0}
GRANITE: dict[str, Any] = {
    "embedding_multiplier": 6.0,
    "attention_multiplier": 0.2,
    "residual_multiplier": 0.6,
    "logits_scaling": 1.5,
}
LONGROPE: dict[str, Any] = {
    "original_max_position_embeddings": 8,
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "partial_rotary_factor": 0.5,
        "short_factor": [1.0 + i for i in range(16)],
        "long_factor": [2.0 + i for i in range(16)],
        "attention_factor": 1.25,
    },
}
SOURCES: dict[str, tuple[Callable[[Path], Path], Callable[[str], Type]]] = {
    **{kind.name: (lambda path: sized(path, "llama"), all_of(kind)) for kind in BLOCKS},
    "F16": (lambda path: sized(path, "llama", tie=True), all_of(Type.F16)),
    "BF16": (lambda path: sized(path, "qwen3"), all_of(Type.BF16)),
    "mixed": (lambda path: sized(path, "llama", tie=True, attention_bias=True), mixed),
    "qwen2": (lambda path: sized(path, "qwen2", kv_heads=1, vocab=385), all_of(Type.Q4_0)),
    "mixtral": (
        lambda path: sized(path, "mixtral", intermediate=256, num_local_experts=4),
        all_of(Type.Q4_K),
    ),
    "qwen3-moe": (
        lambda path: sized(path, "qwen3_moe", norm_topk_prob=True, **EXPERTS),
        all_of(Type.Q8_0),
    ),
    "phi3": (lambda path: sized(path, "phi3", sliding_window=9), all_of(Type.Q4_1)),
    "phi3-long": (lambda path: sized(path, "phi3", **LONGROPE), all_of(Type.Q6_K)),
    "gemma3": (
        lambda path: sized(path, "gemma3_text", layers=6, head_dim=64, tie=True, **GEMMA),
        mixed,
    ),
    "granite": (lambda path: sized(path, "granite", attention_bias=True, **GRANITE), mixed),
    "olmo2": (lambda path: sized(path, "olmo2"), all_of(Type.Q5_0)),
    "qwen3-tied": (lambda path: sized(path, "qwen3", tie=True, vocab=383), all_of(Type.Q5_1)),
}


ON_ONE_RANK = ("olmo2",)
IN_PARTS = {"mixed": 3}  # so many tensors in a file


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = tmp_path_factory.mktemp("gguf")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(own_cache(path / "cache")))
        yield path


@pytest.fixture(scope="module")
def twins(folder: Path) -> dict[str, Twins]:
    """Of all sources, with the results of two ranks left in `folder`."""
    made = {
        name: write_gguf(
            make(folder / name), folder / f"{name}.gguf", type_of, part=IN_PARTS.get(name, 0)
        )
        for name, (make, type_of) in SOURCES.items()
    }
    shared = [pair.quantized.name for name, pair in made.items() if name not in ON_ONE_RANK]
    run_checkpoints(folder, shared)
    return made


def assert_near(actual: Tensor, expected: Tensor) -> None:
    assert expected.std() > 0.3, "logits too flat to tell right from wrong"
    assert (actual - expected).abs().max() < 1e-3 * expected.std()


@pytest.mark.parametrize("name", SOURCES)
@pytest.mark.parametrize("kernels", ["auto", "reference"])
@pytest.mark.rotates(2)
def test_logits_are_those_of_the_weights_meant(
    twins: dict[str, Twins], name: str, kernels: Literal["auto", "reference"]
) -> None:
    results = [run_steps(path, TensorParallel(), kernels) for path in twins[name]]
    assert_near(*(result["logits"] for result in results))


@pytest.mark.parametrize("name", [name for name in SOURCES if name not in ON_ONE_RANK])
def test_two_ranks_equal_one(folder: Path, twins: dict[str, Twins], name: str) -> None:
    alone = run_steps(twins[name].plain, TensorParallel())["logits"]
    for rank in range(2):
        results = torch.load(folder / f"rank{rank}.pt")
        assert_near(results[twins[name].quantized.name]["logits"], alone)


def test_kernels_without_affine_products_get_plain_weights(
    twins: dict[str, Twins], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As those of GPUs are; "mixed" is tied."""
    without = dataclasses.replace(load_kernels("cpu"), affine=False)
    monkeypatch.setattr("support.ranks.tensor_parallel.load_kernels", lambda *_: without)
    for name in ("mixed", "Q5_K"):
        results = [run_steps(path, TensorParallel())["logits"] for path in twins[name]]
        assert_near(*results)


def test_names_are_those_of_a_checkpoint(twins: dict[str, Twins]) -> None:
    for pair in twins.values():
        ours, theirs = (read_entries(path) for path in pair)
        assert {n: e.shape for n, e in ours.items()} == {n: e.shape for n, e in theirs.items()}
