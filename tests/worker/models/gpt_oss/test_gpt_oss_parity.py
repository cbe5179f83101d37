"""gpt-oss gives the logits of transformers, however its prompts are cut."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from support.checkpoints.gpt_oss import WINDOW, make_mxfp4_twins, make_tiny_gpt_oss
from support.parity.stepping import Row, in_one_group, random_prompt, step
from surestep_kernels import KernelSet, load_kernels
from surestep_worker.cache.kv_cache import KVCache
from surestep_worker.distributed.tensor_parallel import TensorParallel
from surestep_worker.models import Model, ModelSource, load_model
from torch import Tensor
from transformers import AutoModelForCausalLM

NATIVE, REFERENCE = load_kernels("cpu"), load_kernels("cpu", "reference")
BLOCK_SIZE, BLOCKS = 8, range(1, 8)
LENGTH = 3 * WINDOW + 1
VARIANTS: dict[str, dict[str, Any]] = {
    "usual": {},
    "tied, odd vocabulary": {"tie_word_embeddings": True, "vocab": 383},
    "no window": {"layer_types": ["full_attention"] * 4},
    "windows alone, of odd size": {"layer_types": ["sliding_attention"] * 4, "sliding_window": 5},
    "no biases": {"attention_bias": False},
    "multi-query, one expert a token": {"num_key_value_heads": 1, "num_experts_per_tok": 1},
    "mxfp4": {},
}


class Pair:
    """One checkpoint, loaded by transformers and by us."""

    def __init__(self, folder: Path, kernels: KernelSet, variant: str) -> None:
        if variant == "mxfp4":
            ours, theirs = make_mxfp4_twins(folder)
        else:
            ours = theirs = make_tiny_gpt_oss(folder, **VARIANTS[variant])
        self._theirs = AutoModelForCausalLM.from_pretrained(
            theirs,
            dtype=torch.float32,
            attn_implementation="eager",
            experts_implementation="eager",
        )
        self.kernels = kernels
        self.model: Model = load_model(
            ModelSource(ours), dtype="auto", device="cpu", tp=TensorParallel(), kernels=kernels
        )

    def cache(self) -> KVCache:
        """A fresh one, in which whatever was never written is NaN."""
        kv = KVCache(in_one_group(self.model.kv_spec(BLOCK_SIZE)), 40, self.kernels, "cpu")
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
    params=[*((variant, NATIVE) for variant in VARIANTS), ("usual", REFERENCE)],
    ids=lambda param: f"{param[0]}, {param[1].name}",
)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    variant, kernels = request.param
    return Pair(tmp_path_factory.mktemp("gpt-oss"), kernels, variant)


def assert_near(actual: Tensor, expected: Tensor) -> None:
    spread = expected.std()
    assert spread > 0.3, "logits too flat to tell right from wrong"
    assert (actual - expected).abs().max() < 1e-4 * spread


def consume(pair: Pair, ids: list[int], cuts: list[int]) -> Tensor:
    """Logits of a prompt that is cut at these places."""
    cache = pair.cache()
    spans = pairwise([0, *cuts, len(ids)])
    return torch.cat([step(pair.model, cache, [Row(ids[a:b], a, BLOCKS)])[0] for a, b in spans])


def test_every_cut_of_a_prompt(pair: Pair) -> None:
    """In two anywhere, in pieces of any size, token by token; our own kernels do not change a bit."""
    ids = random_prompt(LENGTH)
    expected, whole = pair.expected(ids), consume(pair, ids, [])
    assert_near(whole, expected)
    in_two = [[cut] for cut in range(2, LENGTH)]
    for cuts in (*in_two, *(list(range(size, LENGTH, size)) for size in range(1, LENGTH))):
        logits = consume(pair, ids, cuts)
        assert_near(logits, expected)
        assert torch.equal(logits, whole) or pair.kernels is REFERENCE, cuts


def test_windows_of_drafts_cross_the_border_of_a_window(pair: Pair) -> None:
    """Rejected drafts, NaN behind them included, leave no trace in what stands."""
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
