"""Speculation never changes a token: every drafter, window, depth, parameter and neighbourhood.

Expected is what a request answers alone, at depth 0, without speculation. Each test serves the
requests of all sampling parameters together (tests/support/parity/cases.py) and compares every one.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from support.parity.bench import NEIGHBOURS, ParityBench, same, total
from support.parity.cases import TEMPERATURES

DRAFTERS = ("ngram", "oracle", "garbage", "eos-mid", "ragged", "none")
SPECULATION = [
    ("none", 0),
    *((name, k) for k in range(1, 6) for name in (*DRAFTERS, *(f"flip-{j}" for j in range(k)))),
]
DEPTHS = (0, 1, 2)


def depths(request: pytest.FixtureRequest, drafter: str, k: int, where: str) -> Sequence[int]:
    """All of them; alone, where requests run one after the other, one in turn."""
    if where != "alone" or request.config.getoption("--full"):
        return DEPTHS
    return [DEPTHS[SPECULATION.index((drafter, k)) % len(DEPTHS)]]


@pytest.mark.parametrize("where", NEIGHBOURS)
@pytest.mark.parametrize(("drafter", "k"), SPECULATION)
@pytest.mark.rotates(8, always=("none-0", "ngram-4", "flip-1-3"))
def test_speculation_changes_nothing(
    request: pytest.FixtureRequest, bench: ParityBench, drafter: str, k: int, where: str
) -> None:
    for depth in depths(request, drafter, k, where):
        answers = bench.run(where, drafter=drafter, k=k, depth=depth)
        for name, expected in bench.expected.items():
            assert same(answers[name], expected), f"{name} at depth {depth}: {answers[name]}"
        drafted, accepted = total(answers, "num_drafts"), total(answers, "num_accepted")
        assert (drafted > 0) == (drafter != "none")
        assert (accepted == drafted) or drafter not in ("oracle", "ragged")
        assert (total(answers, "num_preemptions") > 0) == (where == "preempted")


def test_every_parameter_changes_the_answer_it_is_compared_by(bench: ParityBench) -> None:
    """Or equality would hold with the parameter ignored."""
    without_effect = {
        name
        for name, answer in bench.expected.items()
        if answer.token_ids == bench.plain[name] and not answer.logprobs.token_id
    }
    greedy = {f"{name}@0.0" for name in ("top_k", "top_p", "min_p", "seed")}
    both = {f"{name}@{t}" for name in ("plain", "prompt_logprobs") for t in TEMPERATURES}
    assert without_effect == greedy | both
    assert all(bench.expected[f"prompt_logprobs@{t}"].prompt_logprobs for t in TEMPERATURES)
