"""DeepSeek-V3, V3.2, GLM-5 and GLM-4.5 give the logits of transformers, however prompts are cut."""

from __future__ import annotations

import json
import shutil
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from support.checkpoints.deepseek import TOP_K, make_tiny_deepseek
from support.parity.stepping import BLOCKS, Pair, Row, random_prompt, step
from surestep_kernels import load_kernels
from surestep_worker.cache.kv_cache import KVCache
from surestep_worker.distributed.tensor_parallel import TensorParallel
from surestep_worker.models import ModelSource, load_model
from torch import Tensor

NATIVE, REFERENCE = load_kernels("cpu"), load_kernels("cpu", "reference")
BLOCK_SIZE = 8
LENGTH = 3 * TOP_K + 1
_YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 40.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 0.7,
    "mscale_all_dim": 1.0,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "v3": {"family": "deepseek_v3"},
    "v3, yarn with mscale": {"family": "deepseek_v3", "rope_parameters": _YARN},
    "v3, plain queries, halves": {
        "family": "deepseek_v3",
        "q_lora_rank": None,
        "rope_interleave": False,
        "n_group": 1,
        "topk_group": 1,
    },
    "v3, weights as they are": {
        "family": "deepseek_v3",
        "norm_topk_prob": False,
        "n_shared_experts": 2,
        "vocab": 383,
    },
    "v3, heads that do not divide its width": {
        "family": "deepseek_v3",
        "hidden_size": 72,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
    },
    "v3.2": {"family": "deepseek_v32"},
    "v3.2, yarn": {"family": "deepseek_v32", "rope_parameters": _YARN},
    "glm-5": {"family": "glm_moe_dsa"},
    "glm-5, all choose": {"family": "glm_moe_dsa", "index_topk_freq": 1},
    "glm-5, dense": {"family": "glm_moe_dsa", "index_topk": 64},
    "glm-4.7-flash": {"family": "glm4_moe_lite"},
    "glm-4.5": {"family": "glm4_moe", "attention_bias": True},
    "glm-4.5, tied, no norms": {
        "family": "glm4_moe",
        "use_qk_norm": False,
        "tie_word_embeddings": True,
    },
}


@pytest.fixture(
    scope="module",
    params=[*((variant, NATIVE) for variant in VARIANTS), ("v3", REFERENCE), ("glm-5", REFERENCE)],
    ids=lambda param: f"{param[0]}, {param[1].name}",
)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    variant, kernels = request.param
    folder = make_tiny_deepseek(tmp_path_factory.mktemp("deepseek"), **VARIANTS[variant])
    return Pair(folder, kernels)


@pytest.mark.rotates(3)
def test_every_cut_of_a_prompt(pair: Pair) -> None:
    pair.assert_no_cut_matters(LENGTH, bit=pair.kernels is not REFERENCE)


@pytest.mark.parametrize("variant", ["v3", "glm-5"])
def test_bfloat16_is_as_exact(tmp_path: Path, variant: str) -> None:
    """Every cut gives the same bits there, too; transformers' differ, by what bfloat16 rounds."""
    folder = make_tiny_deepseek(tmp_path, dtype=torch.bfloat16, **VARIANTS[variant])
    where: dict[str, Any] = {"device": "cpu", "tp": TensorParallel(), "kernels": NATIVE}
    model, results = load_model(ModelSource(folder), dtype="auto", **where), list[Tensor]()
    ids = random_prompt(LENGTH)
    for size in (LENGTH, 1, 2, 5, 11):
        cache = KVCache(model.kv_spec(BLOCK_SIZE), 10, NATIVE, "cpu")
        spans = pairwise([*range(0, LENGTH, size), LENGTH])
        rows = ([Row(ids[a:b], a, BLOCKS)] for a, b in spans)
        results.append(torch.cat([step(model, cache, row)[0] for row in rows]))
    assert results[0].std() > 0.3
    assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.parametrize(
    ("variant", "key", "usual"),
    [
        ("v3", "rope_interleave", True),
        ("v3.2", "indexer_rope_interleave", False),
        ("glm-5", "indexer_rope_interleave", True),
    ],
)
def test_another_kind_of_rotation_is_another_model(
    tmp_path: Path, variant: str, key: str, usual: bool
) -> None:
    """Of two values of a key that transformers does not read, one is what it computes."""
    ids, logits = random_prompt(LENGTH), list[Tensor]()
    folder = make_tiny_deepseek(tmp_path / "theirs", **VARIANTS[variant])
    for value in (usual, not usual):
        ours = Path(shutil.copytree(folder, tmp_path / f"{value}"))
        config = json.loads((ours / "config.json").read_text()) | {key: value}
        (ours / "config.json").write_text(json.dumps(config))
        pair = Pair(folder, NATIVE, ours=ours)
        logits.append(pair.consume(ids))
    pair.assert_near(logits[0], pair.expected(ids))
    assert (logits[1] - logits[0]).abs().max() > 0.1 * logits[0].std()


@pytest.mark.rotates(1)
def test_windows_of_drafts(pair: Pair) -> None:
    """Each row of a window chooses for its own length."""
    pair.assert_windows_leave_no_trace(LENGTH)


def test_rows_of_a_batch_do_not_touch_each_other(pair: Pair) -> None:
    for ids, logits in pair.together():
        pair.assert_near(logits, pair.expected(ids))
