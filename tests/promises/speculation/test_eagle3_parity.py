"""Draft heads and draft models beside the matrix: lookups, devices, ranks, cached prefixes."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from support.parity.bench import (
    BLOCK_SIZE,
    LOOKUP,
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
from surestep_common.invariants import IntArray
from surestep_kernels.table import STEP_REFERENCE
from surestep_proto import sampling_pb2 as pb
from surestep_scheduler.cache.prefix import PrefixChain
from surestep_scheduler.core.sequence import Request
from surestep_scheduler.speculation.speculation import Lengths, Speculation
from surestep_worker.distributed.tensor_parallel import TensorParallel

WHERE = [name for name in NEIGHBOURS if name != "alone"]
CACHED = Neighbours(num_slots=4, step_tokens=40)


@pytest.mark.parametrize("depth", range(3))
@pytest.mark.rotates(2)
def test_lookups_longer_than_what_the_head_may_propose_change_nothing(
    eagle3_bench: ParityBench, depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where a head is too dear for most rows, and looking up is free."""
    rng, shorter = np.random.default_rng(depth), list[int]()
    choose = Speculation.lengths

    def lengths(self: Speculation, slot: IntArray, *told: Any, **named: Any) -> Lengths:
        both = choose(self, slot, *told, **named)
        fewer = both.proposed * rng.integers(0, 2, len(slot)) // 2
        shorter.append(int((both.looked_up - fewer).sum()))
        return Lengths(fewer, both.looked_up)

    monkeypatch.setattr(Speculation, "lengths", lengths)
    conditions = Conditions(shuffle_seed=1 + depth, poison=True)
    where = WHERE[depth % len(WHERE)]
    answers = eagle3_bench.run(
        where, drafter=f"eagle3{LOOKUP}", k=4, depth=depth, conditions=conditions
    )
    for name, expected in eagle3_bench.expected.items():
        assert same(answers[name], expected), f"{name} {where}: {answers[name]}"
    assert sum(shorter) > 100
    assert total(answers, "num_accepted") > 0


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize(
    ("bench_name", "drafter"),
    [
        ("eagle3_bench", "eagle3"),
        ("eagle3_hybrid_bench", "eagle3"),
        ("dflash_bench", "dflash"),
        ("draft_model_bench", "draft_model"),
        ("draft_hybrid_bench", "draft_model"),
    ],
)
@pytest.mark.rotates(3)
def test_steps_of_a_device_change_nothing(
    request: pytest.FixtureRequest, bench_name: str, drafter: str, graphs: bool
) -> None:
    """Launched without waiting, or captured, where every draft is drawn as a random one."""
    bench: ParityBench = request.getfixturevalue(bench_name)
    conditions = Conditions(step_ops=STEP_REFERENCE, graphs=graphs)
    answers = bench.run("mixed", drafter=drafter, k=3, depth=2, conditions=conditions)
    assert (sum(bench.captured) > 0) == graphs
    for name, expected in bench.expected.items():
        assert answers[name].token_ids == expected.token_ids, name
    drafted, accepted = total(answers, "num_drafts"), total(answers, "num_accepted")
    assert drafted > 0
    assert bench_name == "eagle3_hybrid_bench" or accepted > drafted // 8


@pytest.mark.parametrize(
    ("bench_name", "drafter"),
    [
        ("eagle3_bench", f"eagle3{LOOKUP}"),
        ("eagle3_hybrid_bench", "eagle3"),
        ("eagle3_gpt_oss_bench", "eagle3"),
        ("dflash_bench", f"dflash{LOOKUP}"),
        ("dflash_hybrid_bench", "dflash"),
        ("draft_model_bench", f"draft_model{LOOKUP}"),
        ("draft_hybrid_bench", "draft_model"),
    ],
)
@pytest.mark.rotates(4)
def test_two_ranks_equal_one(request: pytest.FixtureRequest, bench_name: str, drafter: str) -> None:
    bench: ParityBench = request.getfixturevalue(bench_name)
    where = NEIGHBOURS["near max_model_len"]
    setup = RankSetup(bench.folder, free_address(), where, drafter, 4, bench.truth, "")
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


def served(
    bench: ParityBench, cut: int, *, caching: bool, drafter: str = "eagle3"
) -> tuple[list[list[int]], int, int]:
    """A prompt, one that leaves it after `cut` tokens, then both again: answers, drafts, accepted."""
    tp, rng = TensorParallel(), random.Random(8)
    first, other = rng.choices(range(3, VOCAB), k=41), rng.choices(range(3, VOCAB), k=20)
    built = build_runner(load(bench.folder, tp), tp, CACHED, drafter, 3)
    engine = LocalEngine(
        one_rank(built.runner),
        built.facts,
        max_num_batched_tokens=CACHED.step_tokens,
        enable_prefix_caching=caching,
    )
    prompts = [first, [*first[:cut], *other], first, [*first, *other]]
    texts = [ask(engine, f"{turn}", prompt) for turn, prompt in enumerate(prompts)]
    counters = engine.state.counters
    assert (counters.prefix_cache_hits >= 5 * BLOCK_SIZE) == caching
    return texts, counters.draft_tokens, counters.accepted_tokens


@pytest.mark.parametrize("cut", range(2 * BLOCK_SIZE, 3 * BLOCK_SIZE + 1))
@pytest.mark.parametrize("drafter", ["eagle3", "dflash", "draft_model"])
@pytest.mark.rotates(3)
def test_a_cached_prefix_changes_neither_tokens_nor_acceptance(
    request: pytest.FixtureRequest, drafter: str, cut: int
) -> None:
    """Prefixes are left at every offset from a block's border."""
    bench: ParityBench = request.getfixturevalue(f"{drafter}_bench")
    cached = served(bench, cut, caching=True, drafter=drafter)
    assert cached == served(bench, cut, caching=False, drafter=drafter)
    assert cached[2] > 0


def test_keys_that_do_not_name_the_next_token_cost_acceptance(
    eagle3_bench: ParityBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At a block's border one prompt would find the other's row."""
    texts, _, accepted = served(eagle3_bench, 2 * BLOCK_SIZE, caching=True)
    begin = PrefixChain.__init__

    def blind(self: PrefixChain, *args: Any, names_next: bool = False, **more: Any) -> None:
        begin(self, *args, **more)

    monkeypatch.setattr(PrefixChain, "__init__", blind)
    broken = served(eagle3_bench, 2 * BLOCK_SIZE, caching=True)
    assert broken[0] == texts
    assert broken[2] < accepted
