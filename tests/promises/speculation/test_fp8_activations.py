"""Activations in FP8: other answers, and still no token by speculation or by neighbours."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.checkpoints.quantize import quantize
from support.parity.bench import CALM, Conditions, make_model
from support.parity.local_engine import Answer
from support.parity.rank_trial import RankTrial, short_requests, tokens
from surestep_common.errors import InvalidRequest
from surestep_kernels.table import STEP_REFERENCE

RANK = RankTrial(short_requests(5, (0.0, 0.0, 0.7)), {"activation_dtype": "fp8"})
build, answers = RANK.build, RANK.answers


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "dense"
    make_model(folder)
    return folder


@pytest.fixture(scope="module")
def quantized(source: Path) -> Path:
    return quantize(source, "fp8").quantized


@pytest.fixture(scope="module")
def alone(quantized: Path) -> dict[str, Answer]:
    """Answers without speculation, one request at a time."""
    return answers(quantized, "alone", "none", 0)


@pytest.mark.parametrize(
    ("where", "drafter", "depth", "conditions"),
    [
        ("mixed", "oracle", 1, CALM),
        ("preempted", "ragged", 2, Conditions(step_ops=STEP_REFERENCE)),
    ],
)
def test_speculation_changes_no_token(
    quantized: Path,
    alone: dict[str, Answer],
    where: str,
    drafter: str,
    depth: int,
    conditions: Conditions,
) -> None:
    RANK.drafts_change_nothing(quantized, alone, where, drafter, depth, conditions)


def test_activations_are_what_is_rounded(quantized: Path, alone: dict[str, Answer]) -> None:
    """Other answers than those of whole activations, under another name."""
    whole = answers(quantized, "alone", "none", 0, activation_dtype="auto")
    assert tokens(whole) != tokens(alone)
    names = [
        build(quantized, activation_dtype=dtype).facts.model_fingerprint
        for dtype in ("auto", "fp8")
    ]
    assert names[1] == f"{names[0]}-fp8_activations"


def test_a_model_without_fp8_weights_is_refused(source: Path) -> None:
    awq = quantize(source, "awq").quantized
    for folder in (source, awq):
        with pytest.raises(InvalidRequest, match="has no FP8 weights") as raised:
            build(folder)
        assert raised.value.param == "activation_dtype"
