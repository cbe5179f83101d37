"""The vector of a prompt: as transformers has it, and the same bits in any company."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from support.checkpoints.embedders import make_tiny_embedder, vectors_by_transformers
from support.checkpoints.hybrid import make_tiny_hybrid
from support.checkpoints.tiny import make_tiny_checkpoint
from support.clients.vector_requests import HIDDEN_STATES, LABELS, for_vectors
from support.parity.bench import (
    CALM,
    NEIGHBOURS,
    Conditions,
    Neighbours,
    build_runner,
    load,
    make_model,
    serve,
    step_of,
)
from support.parity.cases import EOS, VOCAB, strangers
from support.parity.local_engine import Answer
from support.parity.poison import poison_idle
from surestep_common.errors import InvalidRequest
from surestep_kernels.table import STEP_REFERENCE
from surestep_proto import sampling_pb2 as pb
from surestep_scheduler.core.sequence import Finish, Request
from surestep_scheduler.core.state import SchedulerState
from surestep_worker.distributed.tensor_parallel import TensorParallel
from surestep_worker.models import Model
from transformers import AutoModelForCausalLM

TOLERANCE = 1e-5
ALONE = Neighbours(num_slots=1, step_tokens=256)  # every prompt in one step
CROWDED = {
    "mixed": NEIGHBOURS["mixed"],
    "small steps": Neighbours(num_slots=4, num_strangers=3, step_tokens=5),
    "preempted": NEIGHBOURS["preempted"],
}


def make_prompts() -> list[list[int]]:
    """Of many lengths; some begin alike, and blocks are full at the ends of some."""
    rng = random.Random(3)
    shared = [rng.randrange(3, VOCAB) for _ in range(24)]
    own = [[rng.randrange(3, VOCAB) for _ in range(n)] for n in (1, 2, 7, 8, 9, 16, 33, 40)]
    return [*own, *(shared[:n] for n in (8, 16, 17, 24)), [*shared, *own[3]], [*shared, *own[4]]]


PROMPTS = make_prompts()


def pooled_by(
    model: Model,
    requests: Sequence[Request],
    where: Neighbours,
    conditions: Conditions = CALM,
    drafter: tuple[str, int] = ("none", 0),
    depth: int = 1,
) -> dict[str, bytes]:
    """Vectors of the requests that want one."""
    built = build_runner(model, TensorParallel(), where, *drafter, conditions.step_ops)
    if conditions.graphs:
        built.runner.prepare()
    if conditions.poison:

        def poison(state: SchedulerState) -> None:
            poison_idle(built.runner, state)

        conditions = replace(conditions, after_apply=poison)
    step = step_of(built.runner)
    answers = serve(step, built.facts, requests, where, depth, conditions)
    return vectors_in(answers)


def vectors_in(answers: Mapping[str, Answer]) -> dict[str, bytes]:
    vectors = {name: answer.pooled for name, answer in answers.items() if answer.pooled}
    assert all(answers[name].finish is Finish.POOLED for name in vectors)
    assert not any(answers[name].token_ids for name in vectors)
    return vectors


@pytest.mark.parametrize(
    ("architecture", "tie"),
    [
        ("Qwen3ForCausalLM", False),
        ("Qwen3ForCausalLM", True),
        ("Qwen3Model", False),
        ("LlamaModel", True),
        ("MistralModel", False),
        ("Qwen2Model", False),
    ],
)
def test_vectors_are_those_of_transformers(tmp_path: Path, architecture: str, tie: bool) -> None:
    family = architecture.removesuffix("Model").removesuffix("ForCausalLM").lower()
    folder = make_tiny_embedder(tmp_path, architecture=architecture, family=family, tie=tie)
    model = load(folder, TensorParallel())
    assert model.has_head == (tie and architecture == "Qwen3ForCausalLM")
    found = pooled_by(model, for_vectors(PROMPTS, HIDDEN_STATES), CROWDED["small steps"])
    for name, pooling in HIDDEN_STATES.items():
        ours = np.stack([np.frombuffer(found[f"{name} {i}"], "<f4") for i in range(len(PROMPTS))])
        ours /= np.linalg.norm(ours, axis=1, keepdims=True)
        theirs = vectors_by_transformers(folder, PROMPTS, mean=pooling == pb.MEAN)
        assert np.abs(ours - theirs.numpy()).max() < TOLERANCE, name


def test_label_logits_are_those_of_transformers(tmp_path: Path) -> None:
    make_model(tmp_path)
    model = load(tmp_path, TensorParallel())
    found = pooled_by(model, for_vectors(PROMPTS), CROWDED["small steps"])
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path)
    for index, prompt in enumerate(PROMPTS):
        with torch.inference_mode():
            logits = theirs(torch.tensor([prompt])).logits[0, -1, list(LABELS)]
        ours = np.frombuffer(found[f"labels {index}"], "<f4")
        assert np.abs(ours - logits.numpy()).max() < TOLERANCE * logits.abs().max(), index


@pytest.fixture(scope="module", params=["dense", "bfloat16", "hybrid"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    """One that also writes text."""
    folder = tmp_path_factory.mktemp(request.param)
    if request.param == "hybrid":
        make_tiny_hybrid(folder, vocab=VOCAB, eos_token_ids=(EOS,), seed=7)
    elif request.param == "dense":
        make_model(folder)
    else:
        make_tiny_checkpoint(folder, vocab=VOCAB, dtype=torch.bfloat16, seed=5)
    return load(folder, TensorParallel())


@pytest.fixture(scope="module")
def alone(model: Model) -> dict[str, bytes]:
    """Vectors of prompts that are computed one by one, each in one step and from nothing."""
    vectors: dict[str, bytes] = {}
    for request in for_vectors(PROMPTS):
        vectors |= pooled_by(model, [request], ALONE, depth=0)
    return vectors


@pytest.mark.parametrize("where", CROWDED)
@pytest.mark.parametrize(
    "conditions",
    [
        Conditions(poison=True),
        Conditions(prefix_caching=False, shuffle_seed=5),
        Conditions(step_ops=STEP_REFERENCE),
        Conditions(step_ops=STEP_REFERENCE, graphs=True, poison=True),
    ],
    ids=["host", "shuffled", "device", "buckets"],
)
@pytest.mark.rotates(3)
def test_company_and_cuts_change_no_bit(
    model: Model, alone: dict[str, bytes], where: str, conditions: Conditions
) -> None:
    """Among requests that write text and draft, with cached prefixes and under preemption."""
    everyone = [*for_vectors(PROMPTS), *strangers(12)]
    random.Random(where).shuffle(everyone)
    found = pooled_by(model, everyone, CROWDED[where], conditions, drafter=("ngram", 3))
    assert found == alone


def test_a_prompt_may_fill_the_context_and_all_blocks(tmp_path: Path) -> None:
    """Nothing follows it; one token more is refused."""
    make_model(tmp_path)
    model = load(tmp_path, TensorParallel())
    rng = random.Random(1)
    whole = [rng.randrange(3, VOCAB) for _ in range(64)]
    where = Neighbours(num_slots=2, max_model_len=64, num_sequences=2, step_tokens=48)
    found = pooled_by(model, for_vectors([whole]), where)
    roomy = Neighbours(num_slots=1, max_model_len=256, step_tokens=256)
    assert found == pooled_by(model, for_vectors([whole]), roomy)
    with pytest.raises(Exception, match="65 tokens cannot be pooled: the limit is 64"):
        pooled_by(model, for_vectors([[*whole, 3]]), where)


def test_without_an_output_head_nothing_is_written(tmp_path: Path) -> None:
    model = load(make_tiny_embedder(tmp_path, architecture="Qwen3Model"), TensorParallel())
    for headed in (strangers(1), for_vectors(PROMPTS[:1])):
        with pytest.raises(InvalidRequest, match="it writes no text"):
            pooled_by(model, headed, ALONE)
    vectors = for_vectors(PROMPTS, HIDDEN_STATES)
    with pytest.raises(InvalidRequest, match="nothing to draft"):
        pooled_by(model, vectors, ALONE, drafter=("ngram", 3))
    on_device = Conditions(step_ops=STEP_REFERENCE, graphs=True)
    where = CROWDED["mixed"]
    assert pooled_by(model, vectors, where, on_device) == pooled_by(model, vectors, where)
