"""Logits that are not numbers end their own request, with an error, and touch no other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.clients.vector_requests import for_vectors
from support.parity.bench import NEIGHBOURS, ParityBench, build_runner, load, serve, step_of
from support.parity.cases import make_request
from support.parity.local_engine import Answer
from surestep_common.errors import ModelFault
from surestep_kernels.table import STEP_REFERENCE, StepOps
from surestep_scheduler.core.sequence import Request
from surestep_worker.distributed.tensor_parallel import TensorParallel

POISON = 1  # a token in no prompt of the matrix
GREEDY = {"temperature": 0.0, "top_p": 1.0, "repetition_penalty": 1.0}


@pytest.fixture(scope="module")
def poisoned(tmp_path_factory: pytest.TempPathFactory) -> ParityBench:
    """Expectations of the sound model; then the embedding of one token becomes NaN."""
    bench = ParityBench(tmp_path_factory.mktemp("poison"))
    path = bench.folder / "model.safetensors"
    tensors = load_file(path)
    tensors["model.embed_tokens.weight"][POISON] = torch.nan
    save_file(tensors, path, metadata={"format": "pt"})
    return bench


def run(
    bench: ParityBench,
    poisoned: Sequence[Request],
    drafter: tuple[str, int],
    depth: int,
    ops: StepOps | None = None,
) -> dict[str, Answer]:
    """Few blocks, so that others soon reuse those that the poisoned requests wrote NaN into."""
    where = NEIGHBOURS["preempted"]
    tp = TensorParallel()
    built = build_runner(load(bench.folder, tp), tp, where, *drafter, ops)
    mixed = [*poisoned[:3], *bench.requests[:12], *poisoned[3:], *bench.requests[12:]]
    step = step_of(built.runner)
    return serve(step, built.facts, mixed, where, depth, reopen=built.runner.open)


@pytest.mark.parametrize(("drafter", "k", "depth"), [("none", 0, 0), ("ragged", 4, 2)])
def test_only_the_poisoned_end(poisoned: ParityBench, drafter: str, k: int, depth: int) -> None:
    bad = [make_request(f"poisoned {i}", [50 + i, POISON, 7], GREEDY) for i in range(6)]
    answers = run(poisoned, bad, (drafter, k), depth)
    for name, answer in answers.items():
        if name.startswith("poisoned"):
            assert isinstance(answer.error, ModelFault), name
            assert answer.token_ids == []
        elif POISON not in poisoned.expected[name].token_ids:
            assert answer.error is None, name
            assert answer.token_ids == poisoned.expected[name].token_ids, name


@pytest.mark.parametrize("ops", [None, STEP_REFERENCE], ids=["host", "device"])
def test_vectors_that_are_no_numbers_end_alone(poisoned: ParityBench, ops: StepOps | None) -> None:
    """Whether the poison is in the last chunk or in one before."""
    prompts = [[50 + i, POISON, *range(60, 60 + 20 * i)] for i in range(4)]
    sound = [[2 + i, *range(60, 60 + 20 * i)] for i in range(4)]
    bad = [replace(one, id=f"poisoned {one.id}") for one in for_vectors(prompts)]
    answers = run(poisoned, [*bad, *for_vectors(sound)], ("ragged", 4), 2, ops)
    for name, answer in answers.items():
        if name.startswith("poisoned"):
            assert isinstance(answer.error, ModelFault), name
            assert not answer.pooled
        elif name in poisoned.expected:
            assert answer.error is None or POISON in poisoned.expected[name].token_ids, name
        else:
            assert np.isfinite(np.frombuffer(answer.pooled, "<f4")).all(), name
            assert answer.pooled, name
