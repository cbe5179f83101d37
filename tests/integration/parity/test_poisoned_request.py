"""Logits that are not numbers end their own request, with an error, and touch no other."""

from __future__ import annotations

import pytest
import torch
from local_engine import Answer, one_rank
from parity import NEIGHBOURS, ParityBench, build_runner, load, serve
from parity_cases import make_request
from safetensors.torch import load_file, save_file
from surestep_common.errors import ModelFault
from surestep_worker.tp import TensorParallel

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


def run(bench: ParityBench, drafter: str, k: int, depth: int) -> dict[str, Answer]:
    """Few blocks, so that others soon reuse those that the poisoned requests wrote NaN into."""
    where = NEIGHBOURS["preempted"]
    tp = TensorParallel()
    built = build_runner(load(bench.folder, tp), tp, where, drafter, k)
    poisoned = [make_request(f"poisoned {i}", [50 + i, POISON, 7], GREEDY) for i in range(6)]
    mixed = [*poisoned[:3], *bench.requests[:12], *poisoned[3:], *bench.requests[12:]]
    step = one_rank(built.runner)
    return serve(step, built.facts, mixed, where, depth, reopen=built.runner.open)


@pytest.mark.parametrize(("drafter", "k", "depth"), [("none", 0, 0), ("ragged", 4, 2)])
def test_only_the_poisoned_end(poisoned: ParityBench, drafter: str, k: int, depth: int) -> None:
    answers = run(poisoned, drafter, k, depth)
    for name, answer in answers.items():
        if name.startswith("poisoned"):
            assert isinstance(answer.error, ModelFault), name
            assert answer.token_ids == []
        elif POISON not in poisoned.expected[name].token_ids:
            assert answer.error is None, name
            assert answer.token_ids == poisoned.expected[name].token_ids, name
