"""Hybrid models give the logits of transformers, however their prompts are cut."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from support.checkpoints.hybrid import make_tiny_hybrid
from support.parity.stepping import Row, in_one_group, random_prompt, step
from surestep_kernels import load_kernels
from surestep_worker.cache.caches import Caches
from surestep_worker.cache.kv_cache import KVCache
from surestep_worker.cache.recurrent import RecurrentCache
from surestep_worker.distributed.tensor_parallel import TensorParallel
from surestep_worker.models import Model, ModelSource, load_model
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

BLOCK_SIZE, WINDOW, CHUNK = 8, 4, 6
VARIANTS: dict[str, dict[str, Any]] = {
    "next": {"family": "qwen3_next"},
    "next with dense layers": {"family": "qwen3_next", "mlp_only_layers": [0, 2]},
    "3.5": {"family": "qwen3_5"},
    "3.5 tied, odd vocabulary": {"family": "qwen3_5", "tie": True, "vocab": 383},
    "3.5 MoE": {"family": "qwen3_5_moe"},
    "3.5 in its multimodal wrapper": {"family": "qwen3_5", "wrapped": True},
}


class Pair:
    """One checkpoint, loaded by transformers and by us."""

    def __init__(self, folder: Path, variant: dict[str, Any]) -> None:
        make_tiny_hybrid(folder, **variant)
        kind = AutoModelForImageTextToText if variant.get("wrapped") else AutoModelForCausalLM
        self._theirs = kind.from_pretrained(
            folder, dtype=torch.float32, experts_implementation="eager"
        )
        self._kernels = load_kernels("cpu")
        self.model: Model = load_model(
            ModelSource(folder),
            dtype="auto",
            device="cpu",
            tp=TensorParallel(),
            kernels=self._kernels,
        )

    def caches(self) -> Caches:
        """Fresh ones, in which whatever was never written is NaN."""
        spec = self.model.recurrent_spec()
        assert spec is not None
        kv = KVCache(in_one_group(self.model.kv_spec(BLOCK_SIZE)), 40, self._kernels, "cpu")
        recurrent = RecurrentCache(spec, 3, WINDOW, 1, "cpu")
        caches = Caches(kv, recurrent)
        for tensor in (*recurrent.tensors(), *(t for layer in kv.layers for t in layer.pages)):
            tensor.fill_(torch.nan)
        return caches

    @torch.no_grad()
    def expected(self, ids: list[int]) -> Tensor:
        """Logits f32[L, V] of transformers."""
        logits: Tensor = self._theirs(torch.tensor([ids])).logits[0]
        return logits


@pytest.fixture(scope="module", params=VARIANTS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return Pair(tmp_path_factory.mktemp("hybrid"), VARIANTS[request.param])


def assert_near(actual: Tensor, expected: Tensor) -> None:
    spread = expected.std()
    assert spread > 0.3, "logits too flat to tell right from wrong"
    assert (actual - expected).abs().max() < 2e-4 * spread


def consume(pair: Pair, caches: Caches, ids: list[int], cuts: list[int]) -> Tensor:
    """Logits of a prompt in slot 1, cut at these places."""
    bounds = [0, *cuts, len(ids)]
    logits = [
        step(pair.model, caches, [Row(ids[a:b], a, range(1, 12), slot=1)])[0]
        for a, b in pairwise(bounds)
    ]
    return torch.cat(logits)


@pytest.mark.parametrize("length", range(1, 2 * CHUNK + 2))
@pytest.mark.rotates(3)
def test_every_prompt_length_and_cut(pair: Pair, length: int) -> None:
    ids = random_prompt(length)
    whole = consume(pair, pair.caches(), ids, [])
    assert_near(whole, pair.expected(ids))
    chunks = list(range(CHUNK, length, CHUNK))
    for cuts in ([c] for c in range(1, length)):
        assert torch.equal(consume(pair, pair.caches(), ids, cuts), whole)
    assert torch.equal(consume(pair, pair.caches(), ids, chunks), whole)


def test_decode_and_windows_continue_the_prompt(pair: Pair) -> None:
    """Windows of every width with rejected drafts in between equal the plain sequence."""
    ids = random_prompt(40)
    expected = consume(pair, pair.caches(), ids, [])
    caches = pair.caches()
    consume(pair, caches, ids[:10], [])
    done, pending = 10, 0
    while done < len(ids) - WINDOW:
        width, accepted = 1 + done % WINDOW, 1 + done * 7 % (1 + done % WINDOW)
        tokens = [*ids[done : done + accepted], *random_prompt(width - accepted, seed=done)]
        rows = [Row(tokens, done, range(1, 12), slot=1, pending=pending, window=True)]
        (logits,) = step(pair.model, caches, rows)
        assert torch.equal(logits[:accepted], expected[done : done + accepted])
        done, pending = done + accepted, accepted


def test_rows_of_a_batch_do_not_touch_each_other(pair: Pair) -> None:
    ids = {slot: random_prompt(9 + slot, seed=slot) for slot in range(3)}
    blocks = {slot: range(1 + 4 * slot, 5 + 4 * slot) for slot in range(3)}
    caches = pair.caches()
    first = [Row(ids[s][:5], 0, blocks[s], slot=s) for s in (2, 0, 1)]
    second = [Row(ids[s][5:], 5, blocks[s], slot=s, window=False) for s in (1, 2, 0)]
    outputs: dict[int, list[Tensor]] = {s: [] for s in range(3)}
    for rows in (first, second):
        for row, logits in zip(rows, step(pair.model, caches, rows), strict=True):
            outputs[row.slot].append(logits)
    for slot, parts in outputs.items():
        assert torch.equal(torch.cat(parts), consume(pair, pair.caches(), ids[slot], [5]))
