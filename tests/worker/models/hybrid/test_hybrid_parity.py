"""Hybrid models give the logits of transformers, however their prompts are cut."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.checkpoints.hybrid import make_tiny_hybrid
from support.parity.stepping import BLOCKS, WINDOW, Pair, Row, random_prompt, step
from surestep_kernels import load_kernels
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

CHUNK = 6
VARIANTS: dict[str, dict[str, Any]] = {
    "next": {"family": "qwen3_next"},
    "next with dense layers": {"family": "qwen3_next", "mlp_only_layers": [0, 2]},
    "3.5": {"family": "qwen3_5"},
    "3.5 tied, odd vocabulary": {"family": "qwen3_5", "tie": True, "vocab": 383},
    "3.5 MoE": {"family": "qwen3_5_moe"},
    "3.5 in its multimodal wrapper": {"family": "qwen3_5", "wrapped": True},
}


@pytest.fixture(scope="module", params=VARIANTS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    variant = VARIANTS[request.param]
    folder = make_tiny_hybrid(tmp_path_factory.mktemp("hybrid"), **variant)
    kind = AutoModelForImageTextToText if variant.get("wrapped") else AutoModelForCausalLM
    return Pair(folder, load_kernels("cpu"), kind=kind, near=2e-4)


@pytest.mark.parametrize("length", range(1, 2 * CHUNK + 2))
@pytest.mark.rotates(3)
def test_every_prompt_length_and_cut(pair: Pair, length: int) -> None:
    ids = random_prompt(length)
    whole = pair.consume(ids)
    pair.assert_near(whole, pair.expected(ids))
    chunks = list(range(CHUNK, length, CHUNK))
    for cuts in ([c] for c in range(1, length)):
        assert torch.equal(pair.consume(ids, cuts), whole)
    assert torch.equal(pair.consume(ids, chunks), whole)


def test_decode_and_windows_continue_the_prompt(pair: Pair) -> None:
    """Windows of every width with rejected drafts in between equal the plain sequence."""
    ids = random_prompt(40)
    expected = pair.consume(ids)
    caches = pair.caches()
    pair.consume(ids[:10], caches=caches)
    done, pending = 10, 0
    while done < len(ids) - WINDOW:
        width, accepted = 1 + done % WINDOW, 1 + done * 7 % (1 + done % WINDOW)
        tokens = [*ids[done : done + accepted], *random_prompt(width - accepted, seed=done)]
        rows = [Row(tokens, done, BLOCKS, slot=1, pending=pending, window=True)]
        (logits,) = step(pair.model, caches, rows)
        assert torch.equal(logits[:accepted], expected[done : done + accepted])
        done, pending = done + accepted, accepted


def test_rows_of_a_batch_do_not_touch_each_other(pair: Pair) -> None:
    for ids, logits in pair.together():
        assert torch.equal(logits, pair.consume(ids, [5]))
