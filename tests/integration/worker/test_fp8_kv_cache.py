"""An FP8 KV cache: a fraction of the memory, other answers, and still no token by speculation."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.parity.bench import (
    BLOCK_SIZE,
    CALM,
    NEIGHBOURS,
    Conditions,
    make_gpt_oss,
    make_hybrid,
    make_model,
    serve,
    step_of,
    total,
)
from support.parity.cases import NEUTRAL, make_request
from support.parity.latent_models import make_glm_dsa
from support.parity.local_engine import Answer
from support.parity.rank_trial import RankTrial, short_requests, tokens
from surestep_kernels import AttentionCase, load_kernels
from surestep_kernels.mixers.kv_cache import FP8
from surestep_kernels.step.step_ops import STEP_REFERENCE
from surestep_worker.step.runner import Runner

SETTINGS = {"kv_cache_dtype": "fp8_e4m3"}
RANK = RankTrial(short_requests(3, (0.0, 0.0, 0.7, 0.7)), SETTINGS)
build, answers = RANK.build, RANK.answers


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dense")
    make_model(folder)
    return folder


@pytest.fixture(scope="module")
def alone(dense: Path) -> dict[str, Answer]:
    """Answers without speculation, one request at a time."""
    return answers(dense, "alone", "none", 0)


@pytest.mark.parametrize(
    ("where", "drafter", "depth", "conditions"),
    [
        ("mixed", "oracle", 1, CALM),
        ("mixed", "flip-1", 0, Conditions(prefix_caching=False)),
        ("preempted", "ragged", 2, CALM),
        ("near max_model_len", "oracle", 1, Conditions(step_ops=STEP_REFERENCE)),
    ],
)
def test_speculation_changes_no_token(
    dense: Path,
    alone: dict[str, Answer],
    where: str,
    drafter: str,
    depth: int,
    conditions: Conditions,
) -> None:
    RANK.tell_oracles(alone)
    found = answers(dense, where, drafter, depth, conditions)
    assert tokens(found) == tokens(alone)
    assert total(found, "num_accepted") > 0


def test_fp8_is_what_answers(dense: Path, alone: dict[str, Answer]) -> None:
    """Keys and values with 4 bits of significand are seen; where they have all, FP8 is not."""
    reference, native = (
        answers(dense, "alone", "none", 0, kv_cache_dtype="auto", attention_backend=backend)
        for backend in ("torch", "auto")
    )
    assert tokens(reference) == tokens(native)
    assert tokens(alone) != tokens(reference)


def test_a_cached_prefix_answers_as_a_computed_one(dense: Path) -> None:
    prompt = [5, *range(20, 20 + 3 * BLOCK_SIZE)]
    twins = [make_request(name, prompt, {"temperature": 0.0, **NEUTRAL}) for name in "ab"]
    built = build(dense)
    step = step_of(Runner(built.runner.context))
    found = serve(step, built.facts, twins, NEIGHBOURS["alone"], 0)
    assert found["a"].token_ids == found["b"].token_ids != []


def test_a_hybrid_keeps_hidden_states_as_they_are(tmp_path: Path) -> None:
    """The head drafts from pages of FP8 keys, and of hidden states that nobody rounded."""
    make_hybrid(tmp_path)
    alone = answers(tmp_path, "alone", "none", 0)
    found = answers(tmp_path, "near max_model_len", "mtp", 1)
    assert tokens(found) == tokens(alone)
    assert total(found, "num_drafts") > 0
    kv = build(tmp_path, drafter="mtp").runner.context.caches.kv
    assert kv.hidden.dtype is torch.float32
    assert {pages.dtype for layer in kv.layers for pages in layer.pages} == {FP8}


def test_windows_and_sinks_change_no_token_either(tmp_path: Path) -> None:
    make_gpt_oss(tmp_path)
    alone = answers(tmp_path, "alone", "none", 0)
    RANK.tell_oracles(alone)
    found = answers(tmp_path, "mixed", "ragged", 1)
    assert tokens(found) == tokens(alone)
    assert total(found, "num_accepted") > 0
    assert tokens(answers(tmp_path, "alone", "none", 0, kv_cache_dtype="auto")) != tokens(alone)


def test_latents_and_index_keys_change_no_token_either(tmp_path: Path) -> None:
    """They have an FP8 form in C, and what is chosen is chosen by it."""
    make_glm_dsa(tmp_path)
    alone = answers(tmp_path, "alone", "none", 0, attention_backend="auto")
    RANK.tell_oracles(alone)
    for where, drafter in (("mixed", "ragged"), ("preempted", "mtp")):
        found = answers(tmp_path, where, drafter, 1, attention_backend="auto")
        assert tokens(found) == tokens(alone)
        assert total(found, "num_drafts") > 0
    wide = answers(tmp_path, "alone", "none", 0, kv_cache_dtype="auto", attention_backend="auto")
    assert tokens(wide) != tokens(alone)


def test_the_same_memory_holds_as_many_more_blocks(dense: Path) -> None:
    room: dict[str, Any] = {"max_num_seqs": 128, "kv_cache_memory": 0.001}
    wide, narrow = (build(dense, kv_cache_dtype=name, **room).facts for name in ("auto", "fp8"))
    assert 4 * wide.num_blocks <= narrow.num_blocks < 4 * (wide.num_blocks + 1)  # of float32
    assert narrow.dtype == wide.dtype == "float32"


def test_the_c_kernels_have_it(dense: Path) -> None:
    case = replace(AttentionCase.on("cpu"), cache_dtype=FP8)
    taken, named = (load_kernels("cpu", attention_backend=b, case=case) for b in ("auto", "torch"))
    assert taken.paged_attention is not named.paged_attention
    found = answers(dense, "alone", "none", 0, attention_backend="torch")
    assert tokens(found) != tokens(answers(dense, "alone", "none", 0, kv_cache_dtype="auto"))
