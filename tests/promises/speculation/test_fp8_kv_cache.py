"""An FP8 KV cache: a fraction of the memory and other answers; see test_kv_cache_dtypes.py."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.parity.bench import make_gpt_oss, total
from support.parity.latent_models import make_glm_dsa
from support.parity.local_engine import Answer
from support.parity.rank_trial import RankTrial, short_requests, tokens
from surestep_kernels import AttentionCase, load_kernels
from surestep_kernels.store_kv import FP8

SETTINGS = {"kv_cache_dtype": "fp8_e4m3"}
RANK = RankTrial(short_requests(3, (0.0, 0.0, 0.7, 0.7)), SETTINGS)
build, answers = RANK.build, RANK.answers


@pytest.fixture(scope="module")
def alone(dense: Path) -> dict[str, Answer]:
    """Answers without speculation, one request at a time."""
    return answers(dense, "alone", "none", 0)


def test_fp8_is_what_answers(dense: Path, alone: dict[str, Answer]) -> None:
    """Keys and values with 4 bits of significand are seen; where they have all, FP8 is not."""
    reference, native = (
        answers(dense, "alone", "none", 0, kv_cache_dtype="auto", attention_backend=backend)
        for backend in ("torch", "auto")
    )
    assert tokens(reference) == tokens(native)
    assert tokens(alone) != tokens(reference)


def test_it_is_seen_where_there_are_windows_and_sinks(tmp_path: Path) -> None:
    make_gpt_oss(tmp_path)
    alone = answers(tmp_path, "alone", "none", 0)
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
