"""gpt-oss gives the logits of transformers, however its prompts are cut."""

from __future__ import annotations

from typing import Any

import pytest
from support.checkpoints.gpt_oss import WINDOW, make_mxfp4_twins, make_tiny_gpt_oss
from support.parity.stepping import Pair
from surestep_kernels import load_kernels

NATIVE, REFERENCE = load_kernels("cpu"), load_kernels("cpu", "reference")
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


@pytest.fixture(
    scope="module",
    params=[*((variant, NATIVE) for variant in VARIANTS), ("usual", REFERENCE)],
    ids=lambda param: f"{param[0]}, {param[1].name}",
)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    variant, kernels = request.param
    folder = tmp_path_factory.mktemp("gpt-oss")
    if variant == "mxfp4":
        ours, theirs = make_mxfp4_twins(folder)
    else:
        ours = theirs = make_tiny_gpt_oss(folder, **VARIANTS[variant])
    return Pair(theirs, kernels, ours=ours)


@pytest.mark.rotates(1)
def test_every_cut_of_a_prompt(pair: Pair) -> None:
    pair.assert_no_cut_matters(LENGTH, bit=pair.kernels is not REFERENCE)


def test_windows_of_drafts_cross_the_border_of_a_window(pair: Pair) -> None:
    pair.assert_windows_leave_no_trace(LENGTH)


def test_rows_of_a_batch_do_not_touch_each_other(pair: Pair) -> None:
    for ids, logits in pair.together():
        pair.assert_near(logits, pair.expected(ids))
