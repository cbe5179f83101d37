"""Two ranks answer what one answers; a rank that strays is found out at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.clients.vector_requests import for_vectors
from support.parity.bench import (
    HEAD,
    NEIGHBOURS,
    Conditions,
    ParityBench,
    make_eagle3,
    serve,
    total,
)
from support.parity.latent_models import make_glm_with_ties
from support.parity.mutants import PERTURBED_STEP
from support.processes.ports import free_address
from support.ranks.pair import RankFailed, RankSetup, asked_ranks, two_ranks
from surestep_common.invariants import LedgerError

WHERE = NEIGHBOURS["near max_model_len"]


def setup_of(bench: ParityBench, drafter: str, k: int, mutant: str = "") -> RankSetup:
    return RankSetup(bench.folder, free_address(), WHERE, drafter, k, bench.truth, mutant)


@pytest.mark.parametrize(("drafter", "k"), [("none", 0), ("ngram", 4), ("ragged", 3)])
@pytest.mark.rotates(6)
def test_two_ranks_equal_one(bench: ParityBench, drafter: str, k: int) -> None:
    with two_ranks(setup_of(bench, drafter, k)) as (step, facts):
        answers = serve(step, facts, bench.requests, WHERE, depth=1)
    for name, expected in bench.expected.items():
        assert answers[name].token_ids == expected.token_ids, name
    assert (sum(answer.num_accepted for answer in answers.values()) > 0) == (k > 0)


def assert_disordered_pair_equals_one(
    bench: ParityBench, drafter: str, k: int, depth: int, **how: Any
) -> None:
    disorder = Conditions(shuffle_seed=9)
    with two_ranks(setup_of(bench, drafter, k)._replace(**how)) as (step, facts):
        answers = serve(step, facts, bench.requests, WHERE, depth, disorder)
    for name, expected in bench.expected.items():
        assert answers[name].token_ids == expected.token_ids, name
    assert sum(answer.num_accepted for answer in answers.values()) > 0


@pytest.mark.parametrize(("drafter", "k", "depth"), [("mtp", 4, 2), ("ragged", 3, 0)])
@pytest.mark.rotates(6)
def test_two_ranks_of_a_hybrid_equal_one(
    hybrid_bench: ParityBench, drafter: str, k: int, depth: int
) -> None:
    assert_disordered_pair_equals_one(hybrid_bench, drafter, k, depth)


@pytest.mark.parametrize(("drafter", "k", "depth"), [("ngram", 4, 2), ("ragged", 3, 0)])
@pytest.mark.rotates(6)
def test_two_ranks_of_gpt_oss_equal_one(
    gpt_oss_bench: ParityBench, drafter: str, k: int, depth: int
) -> None:
    """Heads are shared out with their sinks."""
    assert_disordered_pair_equals_one(gpt_oss_bench, drafter, k, depth)


@pytest.mark.rotates(6)
def test_two_ranks_with_indexers_equal_one(glm_dsa_bench: ParityBench) -> None:
    """Heads are shared out; latents, index keys and what is chosen are the same on both."""
    assert_disordered_pair_equals_one(glm_dsa_bench, "mtp", 3, depth=1)


@pytest.fixture(scope="module")
def glm_with_ties(tmp_path_factory: pytest.TempPathFactory) -> ParityBench:
    return ParityBench(tmp_path_factory.mktemp("glm_with_ties"), make_glm_with_ties)


@pytest.mark.parametrize("family", ["qwen3_moe", "phi3", "smollm3"])
@pytest.mark.rotates(6)
def test_two_ranks_of_small_families_equal_one(request: pytest.FixtureRequest, family: str) -> None:
    """The columns of experts, and of joined projections, are shared out."""
    assert_disordered_pair_equals_one(request.getfixturevalue(f"{family}_bench"), "ngram", 3, 1)


@pytest.mark.parametrize(
    ("name", "drafter"),
    [
        ("cohere_bench", "ngram"),
        ("eagle3_theirs_bench", "eagle3"),
        ("dflash_theirs_bench", "dflash"),
    ],
)
@pytest.mark.rotates(6)
def test_two_ranks_of_transformers_code_equal_one(
    request: pytest.FixtureRequest, name: str, drafter: str
) -> None:
    """Models: one with a KV head that both ranks have, two with draft heads."""
    bench: ParityBench = request.getfixturevalue(name)
    assert_disordered_pair_equals_one(bench, drafter, 3, 1, implementation="transformers")


def make_half_shared(folder: Path) -> None:
    """A model and a head with an embedding of its own, of whose rows a rank has the model's."""
    make_eagle3(folder)
    file = folder / HEAD / "model.safetensors"
    rows = load_file(folder / "model.safetensors")["model.embed_tokens.weight"].clone()
    rows[len(rows) // 2 :] += 0.1
    save_file(load_file(file) | {"embed_tokens.weight": rows}, file, metadata={"format": "pt"})


@pytest.mark.rotates(6)
def test_a_head_whose_embedding_is_the_models_on_one_rank(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """vllm-project/vllm#50158: what a rank has decides nothing; both draft as one does."""
    made = ParityBench(tmp_path_factory.mktemp("half"), make_half_shared)
    alone = made.serve(made.requests, WHERE, "eagle3", 3, depth=1)
    with two_ranks(setup_of(made, "eagle3", 3)) as (step, facts):
        answers = serve(step, facts, made.requests, WHERE, depth=1)
    for name, expected in made.expected.items():
        assert answers[name].token_ids == expected.token_ids, name
    for count in ("num_drafts", "num_accepted"):
        assert total(answers, count) == total(alone, count) > 0, count


def wrong_answers_of_experts(bench: ParityBench, mutant: str, drafter: str = "mtp") -> set[str]:
    """Which of some requests two ranks that share out whole experts answer otherwise than one."""
    setup = setup_of(bench, drafter, 3, mutant)._replace(expert_parallel=True)
    with two_ranks(setup) as (step, facts):
        answers = serve(step, facts, bench.requests[::4], WHERE, depth=1)
    assert len(answers) > 5
    return {n for n, a in answers.items() if a.token_ids != bench.expected[n].token_ids}


@pytest.mark.rotates(6)
def test_experts_and_ties_of_two_ranks(glm_with_ties: ParityBench) -> None:
    assert wrong_answers_of_experts(glm_with_ties, mutant="") == set()


@pytest.mark.rotates(6)
def test_experts_of_two_ranks_without_a_shared_one(mixtral_bench: ParityBench) -> None:
    assert wrong_answers_of_experts(mixtral_bench, mutant="", drafter="ngram") == set()


@pytest.mark.rotates(6)
def test_a_rank_that_chooses_otherwise_is_seen_at_once(glm_with_ties: ParityBench) -> None:
    """Though both ranks have the same wrong sums: what was chosen is part of the digests."""
    with pytest.raises(LedgerError, match="digest"):
        wrong_answers_of_experts(glm_with_ties, "ties_to_the_highest_positions")


@pytest.mark.rotates(6)
def test_a_rank_without_experts_is_seen(glm_with_ties: ParityBench) -> None:
    """By its answers: the digests do not tell, since both ranks have the same wrong sums."""
    assert wrong_answers_of_experts(glm_with_ties, "experts_of_a_rank_dropped")


@pytest.mark.rotates(6)
def test_where_no_scores_are_equal_ties_do_not_matter(glm_dsa_bench: ParityBench) -> None:
    """So it is ties that the mutant above is caught by, not how it computes scores."""
    assert wrong_answers_of_experts(glm_dsa_bench, "ties_to_the_highest_positions") == set()


@pytest.mark.parametrize(("drafter", "k"), [("none", 0), ("ragged", 3)])
@pytest.mark.rotates(6)
def test_two_ranks_whose_steps_stay_on_their_device(
    bench: ParityBench, drafter: str, k: int
) -> None:
    setup = setup_of(bench, drafter, k)._replace(steps="device")
    with two_ranks(setup) as (step, facts):
        answers = serve(step, facts, bench.requests, WHERE, depth=1)
    for name, expected in bench.expected.items():
        assert answers[name].token_ids == expected.token_ids, name
    assert (sum(answer.num_accepted for answer in answers.values()) > 0) == (k > 0)


@pytest.mark.rotates(6)
@pytest.mark.timeout(300)  # six processes start
def test_two_ranks_capture_what_both_can(bench: ParityBench) -> None:
    """A collective is captured by every rank or by none, when the scheduler orders it."""
    shapes = list[int]()
    for mutant in ("", "half_of_all_captures_fail", "no_captures"):
        setup = setup_of(bench, "ragged", 3, mutant)._replace(steps="captured")
        with asked_ranks(setup) as (step, facts):
            answers = serve(step, facts()[0], bench.requests, WHERE, depth=1)
            of_rank_0, of_rank_1 = (each.captured_shapes for each in facts())
        for name, expected in bench.expected.items():
            assert answers[name].token_ids == expected.token_ids, name
        assert of_rank_0 == of_rank_1
        shapes.append(of_rank_0)  # which could capture all
    assert shapes[0] > shapes[1] > shapes[2] == 0


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize(("drafter", "k"), [("none", 0), ("ragged", 3)])
def test_two_gpus_answer_as_one_cpu_does(bench: ParityBench, drafter: str, k: int) -> None:
    setup = setup_of(bench, drafter, k)._replace(steps="gpu")
    with two_ranks(setup) as (step, facts):
        answers = serve(step, facts, bench.requests, WHERE, depth=1)
    for name, expected in bench.expected.items():
        assert answers[name].token_ids == expected.token_ids, name


@pytest.mark.rotates(6)
def test_two_ranks_make_one_vector(bench: ParityBench) -> None:
    """Every rank sums the same hidden states; the digests would tell otherwise."""
    requests = for_vectors([request.prompt_ids for request in bench.requests[:6]])
    alone = bench.serve(requests, WHERE, "none", 0, depth=1)
    with two_ranks(setup_of(bench, "none", 0)) as (step, facts):
        answers = serve(step, facts, requests, WHERE, depth=1)
    for name, answer in answers.items():
        one, two = (np.frombuffer(a.pooled, "<f4") for a in (alone[name], answer))
        assert len(two) > 0
        assert np.allclose(one, two, atol=1e-4), name


def test_a_changed_bit_is_found_in_its_own_step(bench: ParityBench) -> None:
    found = pytest.raises(LedgerError, match=f"step {PERTURBED_STEP}: rank 1 has digest")
    setup = setup_of(bench, "ragged", 3, "one_bit_of_one_step")
    with two_ranks(setup) as (step, facts), found:
        serve(step, facts, bench.requests, WHERE, depth=1)


@pytest.mark.rotates(6)
def test_a_gate_of_one_rank_is_no_silent_hang(bench: ParityBench) -> None:
    found = pytest.raises((LedgerError, RankFailed))
    setup = setup_of(bench, "ragged", 3, "rank_local_gate")
    with two_ranks(setup) as (step, facts), found:
        serve(step, facts, bench.requests, WHERE, depth=1)
