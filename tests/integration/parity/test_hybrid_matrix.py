"""Speculation never changes a token of a hybrid: drafters, windows, depths, caching, disorder.

Expected is what a request answers alone, at depth 0, without speculation or prefix cache hits. In
every run rows stand in random order, results come late at random, and whatever belongs to nobody is
NaN or out of range.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
from support.parity.bench import NEIGHBOURS, Conditions, ParityBench
from support.parity.local_engine import Answer

DRAFTERS = ("mtp", "ngram", "oracle", "garbage", "eos-mid", "ragged", "flip-1")
WHERE = [name for name in NEIGHBOURS if name != "alone"]
SPECULATION = [("none", 0), *((name, k) for k in range(1, 6) for name in DRAFTERS)]
DEPTHS = (0, 1, 2)


def total(answers: dict[str, Answer], name: str) -> int:
    return sum(getattr(answer, name) for answer in answers.values())


def combinations(request: pytest.FixtureRequest, k: int) -> Iterator[tuple[int, str, bool]]:
    """Depth, neighbours and caching; in turn, differently for every K, or all."""
    if request.config.getoption("--full"):
        yield from itertools.product(DEPTHS, NEIGHBOURS, (False, True))
    else:
        for depth in DEPTHS:
            yield depth, WHERE[(depth + k) % len(WHERE)], (depth + k) % 2 == 0


@pytest.mark.parametrize(("drafter", "k"), SPECULATION)
@pytest.mark.rotates(8, always=("none-0", "mtp-3"))
def test_speculation_changes_nothing(
    request: pytest.FixtureRequest, hybrid_bench: ParityBench, drafter: str, k: int
) -> None:
    for depth, where, caching in combinations(request, k):
        conditions = Conditions(caching, shuffle_seed=1 + depth, poison=True)
        answers = hybrid_bench.run(where, drafter=drafter, k=k, depth=depth, conditions=conditions)
        for name, expected in hybrid_bench.expected.items():
            got = answers[name]
            assert got.error is None, f"{name} {where} at depth {depth}: {got.error}"
            assert got.token_ids == expected.token_ids, f"{name} {where} at depth {depth}"
            assert got.finish == expected.finish, f"{name} {where} at depth {depth}"
            assert got.logprobs == expected.logprobs, f"{name} {where} at depth {depth}"
        drafted, accepted = total(answers, "num_drafts"), total(answers, "num_accepted")
        assert (drafted > 0) == (k > 0)
        assert (accepted == drafted) or drafter not in ("oracle", "ragged")
        assert (total(answers, "num_preemptions") > 0) == (where == "preempted")
