"""DeepSeek-V3, V3.2, GLM-5 and GLM-4.5 give the logits of transformers, however prompts are cut."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from support.checkpoints.deepseek import TOP_K, make_tiny_deepseek
from support.parity.stepping import Row, random_prompt, step
from surestep_kernels import KernelSet, load_kernels
from surestep_worker.cache.kv_cache import KVCache
from surestep_worker.distributed.tensor_parallel import TensorParallel
from surestep_worker.models import Model, ModelSource, load_model
from torch import Tensor
from transformers import AutoModelForCausalLM

NATIVE, REFERENCE = load_kernels("cpu"), load_kernels("cpu", "reference")
BLOCK_SIZE, BLOCKS = 8, range(1, 8)
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


class Pair:
    """One checkpoint, loaded by transformers and by us."""

    def __init__(
        self, folder: Path, kernels: KernelSet, variant: str, told: dict[str, Any] | None = None
    ) -> None:
        """We are `told` something else by config.json than transformers."""
        make_tiny_deepseek(folder, **VARIANTS[variant])
        self._theirs = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=torch.float32,
            attn_implementation="eager",
            experts_implementation="eager",
        )
        file = folder / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | (told or {})))
        self.kernels = kernels
        self.model: Model = load_model(
            ModelSource(folder), dtype="auto", device="cpu", tp=TensorParallel(), kernels=kernels
        )

    def cache(self) -> KVCache:
        """A fresh one, in which whatever was never written is NaN."""
        kv = KVCache(self.model.kv_spec(BLOCK_SIZE), 40, self.kernels, "cpu")
        for layer in kv.layers:
            for pages in layer.pages:
                pages.fill_(torch.nan)
        return kv

    @torch.no_grad()
    def expected(self, ids: list[int]) -> Tensor:
        """Logits f32[L, V] of transformers."""
        logits: Tensor = self._theirs(torch.tensor([ids])).logits[0]
        return logits


@pytest.fixture(
    scope="module",
    params=[*((variant, NATIVE) for variant in VARIANTS), ("v3", REFERENCE), ("glm-5", REFERENCE)],
    ids=lambda param: f"{param[0]}, {param[1].name}",
)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    variant, kernels = request.param
    return Pair(tmp_path_factory.mktemp("deepseek"), kernels, variant)


def assert_near(actual: Tensor, expected: Tensor) -> None:
    spread = expected.std()
    assert spread > 0.3, "logits too flat to tell right from wrong"
    assert (actual - expected).abs().max() < 1e-4 * spread


def consume(pair: Pair, ids: list[int], cuts: list[int]) -> Tensor:
    """Logits of a prompt that is cut at these places."""
    cache = pair.cache()
    spans = pairwise([0, *cuts, len(ids)])
    return torch.cat([step(pair.model, cache, [Row(ids[a:b], a, BLOCKS)])[0] for a, b in spans])


@pytest.mark.rotates(3)
def test_every_cut_of_a_prompt(pair: Pair) -> None:
    """In two anywhere, in pieces of any size, token by token; our own kernels do not change a bit."""
    ids = random_prompt(LENGTH)
    expected, whole = pair.expected(ids), consume(pair, ids, [])
    assert_near(whole, expected)
    in_two = [[cut] for cut in range(2, LENGTH)]
    for cuts in (*in_two, *(list(range(size, LENGTH, size)) for size in range(1, LENGTH))):
        logits = consume(pair, ids, cuts)
        if pair.kernels is REFERENCE:
            assert_near(logits, expected)
        else:
            assert torch.equal(logits, whole), cuts


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
    ids, logits = random_prompt(LENGTH), list[Tensor]()
    for value in (usual, not usual):
        pair = Pair(tmp_path, NATIVE, variant, {key: value})
        logits.append(consume(pair, ids, []))
    assert_near(logits[0], pair.expected(ids))
    assert (logits[1] - logits[0]).abs().max() > 0.1 * logits[0].std()


def test_windows_of_drafts(pair: Pair) -> None:
    """Rejected drafts, NaN behind them included, leave no trace in what stands; each row of a window
    chooses for its own length."""
    ids = random_prompt(LENGTH)
    expected, cache = pair.expected(ids), pair.cache()
    step(pair.model, cache, [Row(ids[:3], 0, BLOCKS)])
    done = 3
    while done < LENGTH - 6:
        width, accepted = 1 + done % 6, 1 + done * 5 % (1 + done % 6)
        tokens = [*ids[done : done + accepted], *random_prompt(width - accepted, seed=done)]
        (logits,) = step(pair.model, cache, [Row(tokens, done, BLOCKS, window=True)])
        assert_near(logits[:accepted], expected[done : done + accepted])
        done += accepted


def test_rows_of_a_batch_do_not_touch_each_other(pair: Pair) -> None:
    ids = {line: random_prompt(9 + 3 * line, seed=line) for line in range(3)}
    blocks = {line: range(1 + 4 * line, 5 + 4 * line) for line in range(3)}
    cache = pair.cache()
    outputs: dict[int, list[Tensor]] = {line: [] for line in range(3)}
    for order, a, b in (((2, 0, 1), 0, 5), ((1, 2, 0), 5, None)):
        rows = [Row(ids[line][a:b], a, blocks[line]) for line in order]
        for line, logits in zip(order, step(pair.model, cache, rows), strict=True):
            outputs[line].append(logits)
    for line, parts in outputs.items():
        assert_near(torch.cat(parts), pair.expected(ids[line]))
