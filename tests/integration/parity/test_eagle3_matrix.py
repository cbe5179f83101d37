"""An EAGLE-3 head never changes a token: windows, depths, neighbours, cached prefixes, ranks."""

from __future__ import annotations

import random

import pytest
from support.parity.bench import (
    BLOCK_SIZE,
    NEIGHBOURS,
    Conditions,
    Neighbours,
    ParityBench,
    build_runner,
    load,
    same,
    serve,
    total,
)
from support.parity.cases import VOCAB
from support.parity.local_engine import LocalEngine, one_rank
from support.processes.ports import free_address
from support.ranks.pair import RankSetup, two_ranks
from surestep_proto import sampling_pb2 as pb
from surestep_scheduler.core.sequence import Request
from surestep_worker.distributed.tensor_parallel import TensorParallel

WHERE = [name for name in NEIGHBOURS if name != "alone"]
CACHED = Neighbours(num_slots=4, step_tokens=40)


@pytest.mark.parametrize("k", range(1, 6))
@pytest.mark.parametrize("depth", range(3))
@pytest.mark.rotates(4, always=("0-3",))
def test_drafts_change_nothing(eagle3_bench: ParityBench, k: int, depth: int) -> None:
    where = WHERE[(depth + k) % len(WHERE)]
    conditions = Conditions((depth + k) % 2 == 0, shuffle_seed=1 + depth, poison=True)
    answers = eagle3_bench.run(where, drafter="eagle3", k=k, depth=depth, conditions=conditions)
    for name, expected in eagle3_bench.expected.items():
        assert same(answers[name], expected), f"{name} {where}: {answers[name]}"
    drafted, accepted = total(answers, "num_drafts"), total(answers, "num_accepted")
    assert accepted > drafted // 8 > 0
    assert (total(answers, "num_preemptions") > 0) == (where == "preempted")


@pytest.mark.parametrize("k", [1, 3, 5])
@pytest.mark.rotates(3, always=("3",))
def test_drafts_change_nothing_of_a_hybrid(eagle3_hybrid_bench: ParityBench, k: int) -> None:
    for depth in range(3):
        where = WHERE[(depth + k) % len(WHERE)]
        conditions = Conditions(shuffle_seed=1 + depth, poison=True)
        answers = eagle3_hybrid_bench.run(
            where, drafter="eagle3", k=k, depth=depth, conditions=conditions
        )
        for name, expected in eagle3_hybrid_bench.expected.items():
            assert answers[name].token_ids == expected.token_ids, f"{name} {where} at {depth}"
        assert total(answers, "num_drafts") > 0


@pytest.mark.parametrize("bench_name", ["eagle3_bench", "eagle3_hybrid_bench"])
def test_two_ranks_equal_one(request: pytest.FixtureRequest, bench_name: str) -> None:
    bench: ParityBench = request.getfixturevalue(bench_name)
    where = NEIGHBOURS["near max_model_len"]
    setup = RankSetup(bench.folder, free_address(), where, "eagle3", 4, bench.truth, "")
    with two_ranks(setup) as (step, facts):
        answers = serve(step, facts, bench.requests, where, 2, Conditions(shuffle_seed=9))
    for name, expected in bench.expected.items():
        assert answers[name].token_ids == expected.token_ids, name
    assert total(answers, "num_drafts") > 0


def ask(engine: LocalEngine, name: str, prompt: list[int], temperature: float = 0.0) -> list[int]:
    sampling = pb.SamplingParams(
        temperature=temperature, seed=len(prompt), top_p=1.0, repetition_penalty=1.0
    )
    made = Request(id=name, prompt_ids=prompt, emitted_ids=[], max_tokens=24, sampling=sampling)
    return engine.run([made])[name].token_ids


@pytest.mark.parametrize("cut", range(2 * BLOCK_SIZE, 3 * BLOCK_SIZE + 1))
def test_a_cached_prefix_changes_neither_tokens_nor_acceptance(
    eagle3_bench: ParityBench, cut: int
) -> None:
    """A prompt that leaves another at every offset from a block's border, then both again."""
    tp, rng = TensorParallel(), random.Random(8)
    first, other = rng.choices(range(3, VOCAB), k=41), rng.choices(range(3, VOCAB), k=20)
    prompts = [first, [*first[:cut], *other], first, [*first, *other]]
    counts = []
    for caching in (True, False):
        built = build_runner(load(eagle3_bench.folder, tp), tp, CACHED, "eagle3", 3)
        engine = LocalEngine(
            one_rank(built.runner),
            built.facts,
            max_num_batched_tokens=CACHED.step_tokens,
            enable_prefix_caching=caching,
        )
        texts = [ask(engine, f"{turn}", prompt) for turn, prompt in enumerate(prompts)]
        counters = engine.state.counters
        counts.append((texts, counters.draft_tokens, counters.accepted_tokens))
        assert (counters.prefix_cache_hits >= 5 * BLOCK_SIZE) == caching
    assert counts[0] == counts[1]
    assert counts[0][2] > 0
