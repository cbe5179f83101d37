"""Logits of the dense models against transformers, however the tokens are cut into steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from support.checkpoints.tiny import FAMILIES, make_tiny_checkpoint
from support.parity.stepping import Row, generate, in_one_group, step
from surestep_kernels import KernelSet, load_kernels
from surestep_worker.cache.kv_cache import KVCache
from surestep_worker.distributed.tensor_parallel import TensorParallel
from surestep_worker.models import Model, ModelSource, load_model
from torch import Tensor
from transformers import AutoModelForCausalLM

BLOCK_SIZE = 16
LENGTH = 20
TOLERANCE = 1e-4
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 64,
}
VARIANTS: dict[str, dict[str, Any]] = {
    **{family: {"family": family} for family in FAMILIES},
    **{f"{family}-tied": {"family": family, "tie": True} for family in FAMILIES},
    "multi-head": {"kv_heads": 4},
    "multi-query": {"kv_heads": 1},
    "qwen3-multi-query": {"family": "qwen3", "kv_heads": 1},
    "wide-heads": {"family": "qwen3", "head_dim": 32},
    "all-biases": {"attention_bias": True, "mlp_bias": True},
    "qwen3-biases": {"family": "qwen3", "attention_bias": True},
    "rope-linear": {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}},
    "rope-llama3": {"rope_parameters": LLAMA3},
    "rope-yarn": {"rope_parameters": YARN},
    "window-not-reached": {"family": "mistral", "sliding_window": LENGTH},
    "window": {"family": "mistral", "sliding_window": 6},
    "window-of-one-layer": {
        "family": "qwen3",
        "sliding_window": 7,
        "use_sliding_window": True,
        "max_window_layers": 1,
    },
}


CASES = [
    *(("C", name) for name in VARIANTS),
    *(("torch reference", name) for name in FAMILIES),
]


class Case(NamedTuple):
    """One checkpoint, loaded by us and by transformers."""

    kernels: KernelSet
    ours: Model
    theirs: Any


@pytest.fixture(scope="module", params=CASES, ids="-".join)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    kernels_name, variant = request.param
    kernels = load_kernels("cpu", "reference" if kernels_name == "torch reference" else "auto")
    if kernels.name != kernels_name:
        pytest.skip("no C compiler")
    path = make_tiny_checkpoint(tmp_path_factory.mktemp("tiny"), **VARIANTS[variant])
    theirs = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    return Case(kernels, _load(path, kernels), theirs)


def _load(path: Path, kernels: KernelSet) -> Model:
    return load_model(
        ModelSource(path),
        dtype="auto",
        device="cpu",
        tp=TensorParallel(),
        kernels=kernels,
        max_model_len=LENGTH,
    )


def _poisoned_cache(case: Case) -> KVCache:
    kv = KVCache(in_one_group(case.ours.kv_spec(BLOCK_SIZE)), 12, case.kernels, "cpu")
    for cache in kv.layers:
        cache.k.fill_(torch.nan)
        cache.v.fill_(torch.nan)
    return kv


def _tokens(seed: int, length: int = LENGTH) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(384, (length,), generator=generator).tolist()


@torch.no_grad()
def _reference(case: Case, tokens: list[int]) -> Tensor:
    logits: Tensor = case.theirs(torch.tensor([tokens])).logits[0]
    return logits


def _assert_close(logits: Tensor, expected: Tensor) -> None:
    assert logits.dtype == torch.float32
    assert logits.shape == expected.shape
    assert (logits - expected).abs().max().item() <= TOLERANCE


@pytest.mark.parametrize("border", range(1, LENGTH))
@pytest.mark.rotates(1)
def test_two_chunks_then_decode(case: Case, border: int) -> None:
    tokens, blocks = _tokens(1), (7, 2)
    kv = _poisoned_cache(case)
    edges = sorted({0, border, max(border, LENGTH - 3), *range(max(border, LENGTH - 3), LENGTH)})
    spans = zip(edges, [*edges[1:], LENGTH], strict=True)
    logits = [step(case.ours, kv, [Row(tokens[a:b], a, blocks)])[0] for a, b in spans]
    _assert_close(torch.cat(logits), _reference(case, tokens))


def test_batch_of_prefill_chunk_decode_and_window(case: Case) -> None:
    sequences = [_tokens(seed) for seed in range(2, 6)]
    blocks = [(1, 5), (2, 6), (7, 3), (8, 4)]
    kv = _poisoned_cache(case)
    edges = [(0, 19, 20), (0, 3, 17), (0, 14, 18), (0, 1, 20)]  # decode, chunk, window, chunk
    for turn in range(2):
        rows = [
            Row(tokens[edge[turn] : edge[turn + 1]], edge[turn], table)
            for tokens, edge, table in zip(sequences, edges, blocks, strict=True)
        ]
        for tokens, row, logits in zip(sequences, rows, step(case.ours, kv, rows), strict=True):
            expected = _reference(case, tokens)[row.start : row.start + len(row.tokens)]
            _assert_close(logits, expected)


def test_rejected_positions_are_overwritten(case: Case) -> None:
    tokens, blocks = _tokens(6), (11, 2)
    wrong = [*tokens[:14], *_tokens(7, 4)]
    kv = _poisoned_cache(case)
    step(case.ours, kv, [Row(wrong, 0, blocks)])
    (logits,) = step(case.ours, kv, [Row(tokens[14:], 14, blocks)])
    _assert_close(logits, _reference(case, tokens)[14:])


@torch.no_grad()
def test_greedy_ids(case: Case) -> None:
    prompt = _tokens(8, 12)
    theirs = case.theirs.generate(torch.tensor([prompt]), max_new_tokens=8, do_sample=False)
    ours = generate(case.ours, _poisoned_cache(case), prompt, max_tokens=8, chunk=5)
    assert ours == theirs[0, len(prompt) :].tolist()
