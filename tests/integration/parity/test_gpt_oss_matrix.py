"""Speculation never changes a token of gpt-oss: drafters, windows, depths, caching, disorder.

Its sliding window is shorter than any request, and drafts lie on both sides of its border. Expected
is what a request answers alone, at depth 0, without speculation or prefix cache hits. In every run
rows stand in random order, results come late at random, and whatever belongs to nobody is NaN or
out of range.
"""

from __future__ import annotations

import random

import pytest
from support.checkpoints.gpt_oss import WINDOW
from support.parity.bench import (
    BLOCK_SIZE,
    NEIGHBOURS,
    Conditions,
    Neighbours,
    ParityBench,
    same,
    total,
)
from support.parity.cases import VOCAB, make_request
from support.parity.gpt_oss_mutants import GPT_OSS_MUTANTS

DRAFTERS = ("ngram", "oracle", "garbage", "eos-mid", "ragged", "flip-1")
SPECULATION = [("none", 0), *((name, k) for k in range(1, 6) for name in DRAFTERS)]
WHERE = [name for name in NEIGHBOURS if name != "alone"]
DEPTHS = (0, 1, 2)
ONE_BY_ONE = Neighbours(num_slots=1)


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize(("drafter", "k"), SPECULATION)
@pytest.mark.rotates(8, always=("mixed-none-0", "mixed-ngram-4", "preempted-flip-1-3"))
def test_speculation_changes_nothing(
    request: pytest.FixtureRequest, gpt_oss_bench: ParityBench, drafter: str, k: int, where: str
) -> None:
    depths = DEPTHS if request.config.getoption("--full") else [(k + len(drafter)) % 3]
    for depth in depths:
        conditions = Conditions(k % 2 == 0, shuffle_seed=1 + depth, poison=True)
        answers = gpt_oss_bench.run(where, drafter=drafter, k=k, depth=depth, conditions=conditions)
        for name, expected in gpt_oss_bench.expected.items():
            assert same(answers[name], expected), f"{name} at depth {depth}: {answers[name]}"
        drafted, accepted = total(answers, "num_drafts"), total(answers, "num_accepted")
        assert (drafted > 0) == (k > 0)
        assert (accepted == drafted) or drafter not in ("oracle", "ragged")
        assert (total(answers, "num_preemptions") > 0) == (where == "preempted")


# A request needs six blocks of the layers without a window, and two of those with one. If both kept
# all positions it would need twelve.
CROWDED = Neighbours(num_slots=4, num_strangers=3, step_tokens=24, num_blocks=1 + 6 + 2 + 2)


@pytest.mark.parametrize(
    ("drafter", "k", "depth"), [("none", 0, 1), ("ragged", 5, 0), ("ngram", 3, 2)]
)
def test_a_pool_without_room_for_all_positions(
    gpt_oss_bench: ParityBench, drafter: str, k: int, depth: int
) -> None:
    """Even of one request. Several take turns, and blocks go from one kind of layer to the other."""
    conditions = Conditions(shuffle_seed=3, poison=True)
    requests = gpt_oss_bench.requests[::4]
    answers = gpt_oss_bench.serve(requests, CROWDED, drafter, k, depth, conditions)
    for request in requests:
        assert same(answers[request.id], gpt_oss_bench.expected[request.id]), request.id
    assert total(answers, "num_preemptions") > 0


@pytest.mark.parametrize("cut", range(2 * BLOCK_SIZE, 3 * BLOCK_SIZE + 1))
@pytest.mark.rotates(3)
def test_shared_prefixes_change_nothing(gpt_oss_bench: ParityBench, cut: int) -> None:
    """Prefixes are left at every offset from the borders of blocks and windows."""
    assert WINDOW == BLOCK_SIZE
    rng = random.Random(8)
    first, other = rng.choices(range(3, VOCAB), k=30), rng.choices(range(3, VOCAB), k=9)
    texts = [first, [*first[:cut], *other], first, [*first, *other]]
    params = {"temperature": 0.8, "seed": cut, "top_p": 1.0, "repetition_penalty": 1.0}
    requests = [make_request(f"{turn}", text, params) for turn, text in enumerate(texts)]
    answers = [
        gpt_oss_bench.serve(requests, ONE_BY_ONE, "ngram", 3, 1, Conditions(caching))
        for caching in (True, False)
    ]
    for name, answer in answers[0].items():
        assert answer.token_ids
        assert same(answer, answers[1][name]), name


def wrong_answers(bench: ParityBench, drafter: str, k: int) -> set[str]:
    answers = bench.run("mixed", drafter=drafter, k=k, depth=1)
    return {n for n, a in answers.items() if a.token_ids != bench.expected[n].token_ids}


@pytest.mark.parametrize("name", GPT_OSS_MUTANTS)
@pytest.mark.rotates(2)
def test_mutant_is_caught(
    gpt_oss_bench: ParityBench, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    GPT_OSS_MUTANTS[name](monkeypatch)
    assert wrong_answers(gpt_oss_bench, "ragged", 5)
