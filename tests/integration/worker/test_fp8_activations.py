"""Activations in FP8: other answers, and still no token by speculation or by neighbours."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from drafters import TRUTH
from local_engine import Answer
from parity import BLOCK_SIZE, CALM, NEIGHBOURS, Conditions, make_model, serve, step_of, total
from parity_cases import EOS, NEUTRAL, VOCAB, make_request, strangers
from quantize import quantize
from surestep_common.errors import InvalidRequest
from surestep_kernels.step_ops import STEP_REFERENCE
from surestep_worker.build import Built, build_runner
from surestep_worker.config import WorkerSettings
from surestep_worker.runner import Runner

_RNG = random.Random(5)
REQUESTS = [
    make_request(
        f"{i}@{temperature}",
        [3 + i, *_RNG.choices(range(20, VOCAB), k=9 + i)],
        {"temperature": temperature, "seed": i, **NEUTRAL},
    )
    for i, temperature in enumerate((0.0, 0.0, 0.7))
]


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


def build(folder: Path, where: str = "alone", drafter: str = "none", **changes: Any) -> Built:
    """A rank from its settings, as a process would build it."""
    neighbours = NEIGHBOURS[where]
    defaults: dict[str, Any] = {
        "model": folder,
        "dtype": "float32",
        "activation_dtype": "fp8",
        "max_num_seqs": neighbours.num_slots,
        "max_model_len": neighbours.max_model_len,
        "block_size": BLOCK_SIZE,
        "kv_cache_memory": 0.01,
        "speculative_config": {"method": drafter, "num_speculative_tokens": 3},
    }
    return build_runner(WorkerSettings(**(defaults | changes)))


def answers(
    folder: Path,
    where: str,
    drafter: str,
    depth: int,
    conditions: Conditions = CALM,
    **changes: Any,
) -> dict[str, Answer]:
    """Of REQUESTS, among strangers."""
    built = build(folder, where, drafter, **changes)
    runner = Runner(built.runner.parts._replace(step_ops=conditions.step_ops))
    everyone = [*REQUESTS, *strangers(NEIGHBOURS[where].num_strangers // 3)]
    found = serve(step_of(runner), built.facts, everyone, NEIGHBOURS[where], depth, conditions)
    return {request.id: found[request.id] for request in REQUESTS}


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
    full = [[*request.prompt_ids, *alone[request.id].token_ids] for request in REQUESTS]
    TRUTH.learn(full, vocab_size=VOCAB, stop_id=EOS)
    found = answers(quantized, where, drafter, depth, conditions)
    assert {n: a.token_ids for n, a in found.items()} == {n: a.token_ids for n, a in alone.items()}
    assert total(found, "num_accepted") > 0


def test_activations_are_what_is_rounded(quantized: Path, alone: dict[str, Answer]) -> None:
    """Other answers than those of whole activations, under another name."""
    whole = answers(quantized, "alone", "none", 0, activation_dtype="auto")
    assert [a.token_ids for a in whole.values()] != [a.token_ids for a in alone.values()]
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
