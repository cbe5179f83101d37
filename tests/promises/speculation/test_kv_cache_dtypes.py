"""Keys and values of a byte, FP8 or INT8: still no token by speculation."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from support.parity.bench import (
    BLOCK_SIZE,
    CALM,
    NEIGHBOURS,
    Conditions,
    make_gpt_oss,
    make_hybrid,
    serve,
    step_of,
    total,
)
from support.parity.cases import NEUTRAL, make_request
from support.parity.local_engine import Answer
from support.parity.rank_trial import RankTrial, short_requests, tokens
from surestep_kernels.store_kv import FP8, INT8
from surestep_kernels.table import STEP_REFERENCE
from surestep_worker.step.runner import Runner


class Kind(NamedTuple):
    """A type of pages, and ranks that have such."""

    pages: torch.dtype
    rank: RankTrial


KINDS = {
    name: Kind(pages, RankTrial(short_requests(3, (0.0, 0.0, 0.7, 0.7)), {"kv_cache_dtype": name}))
    for name, pages in (("fp8_e4m3", FP8), ("int8", INT8))
}


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> Kind:
    return KINDS[request.param]


@pytest.fixture(scope="module")
def alone(dense: Path, kind: Kind) -> dict[str, Answer]:
    """Answers without speculation, one request at a time."""
    return kind.rank.answers(dense, "alone", "none", 0)


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
    kind: Kind,
    alone: dict[str, Answer],
    where: str,
    drafter: str,
    depth: int,
    conditions: Conditions,
) -> None:
    kind.rank.drafts_change_nothing(dense, alone, where, drafter, depth, conditions)


def test_a_cached_prefix_answers_as_a_computed_one(dense: Path, kind: Kind) -> None:
    prompt = [5, *range(20, 20 + 3 * BLOCK_SIZE)]
    twins = [make_request(name, prompt, {"temperature": 0.0, **NEUTRAL}) for name in "ab"]
    built = kind.rank.build(dense)
    step = step_of(Runner(built.runner.context))
    found = serve(step, built.facts, twins, NEIGHBOURS["alone"], 0)
    assert found["a"].token_ids == found["b"].token_ids != []


def test_a_hybrid_keeps_hidden_states_as_they_are(tmp_path: Path, kind: Kind) -> None:
    """The head drafts from narrow pages of keys, and of hidden states that nobody rounded."""
    make_hybrid(tmp_path)
    alone = kind.rank.answers(tmp_path, "alone", "none", 0)
    found = kind.rank.answers(tmp_path, "near max_model_len", "mtp", 1)
    assert tokens(found) == tokens(alone)
    assert total(found, "num_drafts") > 0
    kv = kind.rank.build(tmp_path, drafter="mtp").runner.context.caches.kv
    assert kv.hidden.dtype is torch.float32
    assert {pages.dtype for layer in kv.layers for pages in layer.pages} == {kind.pages}


def test_windows_and_sinks_change_no_token_either(tmp_path: Path, kind: Kind) -> None:
    make_gpt_oss(tmp_path)
    alone = kind.rank.answers(tmp_path, "alone", "none", 0)
    kind.rank.drafts_change_nothing(tmp_path, alone, "mixed", "ragged", 1)
