"""Attention windows that are shorter than requests, as in gpt-oss: their blocks are given back."""

from __future__ import annotations

import random

import pytest
from support.checkpoints.gpt_oss import WINDOW
from support.parity.bench import (
    BLOCK_SIZE,
    Conditions,
    Neighbours,
    ParityBench,
    same,
    total,
)
from support.parity.cases import VOCAB, make_request

ONE_BY_ONE = Neighbours(num_slots=1)


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
