"""An INT8 KV cache, with a scale for each position and head: still no token by speculation."""

from __future__ import annotations

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
from surestep_common.errors import InvalidRequest
from surestep_kernels.mixers.kv_cache import INT8
from surestep_kernels.step.step_ops import STEP_REFERENCE
from surestep_worker.step.runner import Runner

RANK = RankTrial(short_requests(3, (0.0, 0.0, 0.7, 0.7)), {"kv_cache_dtype": "int8"})
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


def test_a_cached_prefix_answers_as_a_computed_one(dense: Path) -> None:
    prompt = [5, *range(20, 20 + 3 * BLOCK_SIZE)]
    twins = [make_request(name, prompt, {"temperature": 0.0, **NEUTRAL}) for name in "ab"]
    built = build(dense)
    step = step_of(Runner(built.runner.context))
    found = serve(step, built.facts, twins, NEIGHBOURS["alone"], 0)
    assert found["a"].token_ids == found["b"].token_ids != []


def test_a_draft_head_has_pages_of_the_same_type(tmp_path: Path) -> None:
    make_hybrid(tmp_path)
    alone = answers(tmp_path, "alone", "none", 0)
    found = answers(tmp_path, "near max_model_len", "mtp", 1)
    assert tokens(found) == tokens(alone)
    assert total(found, "num_drafts") > 0
    kv = build(tmp_path, drafter="mtp").runner.context.caches.kv
    assert kv.hidden.dtype is torch.float32
    assert {pages.dtype for layer in kv.layers for pages in layer.pages} == {INT8}


def test_windows_and_sinks_change_no_token_either(tmp_path: Path) -> None:
    make_gpt_oss(tmp_path)
    alone = answers(tmp_path, "alone", "none", 0)
    RANK.tell_oracles(alone)
    found = answers(tmp_path, "mixed", "ragged", 1)
    assert tokens(found) == tokens(alone)
    assert total(found, "num_accepted") > 0


def test_the_same_memory_holds_more_blocks(dense: Path) -> None:
    """The fingerprint says what they hold: no successor with other pages is taken for the same."""
    room: dict[str, Any] = {"max_num_seqs": 128, "kv_cache_memory": 0.001}
    wide, narrow = (build(dense, kv_cache_dtype=n, **room).facts for n in ("auto", "int8"))
    assert 2 * wide.num_blocks < narrow.num_blocks < 4 * wide.num_blocks
    assert narrow.dtype == wide.dtype == "float32"
    assert wide.model_fingerprint != narrow.model_fingerprint
    assert narrow.model_fingerprint.endswith("int8")


def test_latents_have_no_such_form(tmp_path: Path) -> None:
    make_glm_dsa(tmp_path)
    with pytest.raises(InvalidRequest, match="this model caches latents") as raised:
        build(tmp_path)
    assert raised.value.param == "kv_cache_dtype"
