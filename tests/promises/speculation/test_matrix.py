"""Speculation never changes a token: families, drafters, windows, depths, neighbours.

Expected is what a request answers alone, at depth 0, without speculation or prefix cache hits. Each
case serves the requests of all sampling parameters together (tests/support/parity/cases.py) and
compares every one. Rows stand in random order, results come late at random, and whatever belongs to
nobody is NaN or out of range.

What a family adds: the window of gpt-oss is shorter than any request, so that drafts lie on both
sides of its border; requests are longer than what an indexer chooses; a guided request drafts what
its grammar forces, whatever else drafts.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import pytest
from support.parity.bench import LOOKUP, NEIGHBOURS, Conditions, ParityBench, same, total
from support.parity.cases import TEMPERATURES

DEPTHS = (0, 1, 2)
BRANCHES = ("gemma2", "gemma3", "olmo3", "granite")
SMALL = ("mixtral", "qwen3_moe", "phi3", "smollm3", "cohere")
# Families whose drafts are right, most of them.
RIGHT = (
    *("eagle3_bench", "dflash_bench"),
    *("draft_model_bench", "draft_theirs_bench", "draft_hybrid_bench"),
)
CHARACTERS = ("ngram", "oracle", "garbage", "eos-mid", "ragged")


class Family(NamedTuple):
    """Drafters of a family, and the most drafts of a window."""

    drafters: tuple[str, ...]
    most: int = 5


FAMILIES = {  # by the fixture of its bench
    "bench": Family((*CHARACTERS, "none", *(f"flip-{j}" for j in range(5)))),
    "hybrid_bench": Family((*CHARACTERS, "mtp", "flip-1")),
    **{f"{name}_bench": Family(("mtp",), most=2) for name in ("mimo", "ernie")},
    "gpt_oss_bench": Family((*CHARACTERS, "flip-1")),
    "glm_dsa_bench": Family((*CHARACTERS, "mtp", "flip-1"), most=3),
    "deepseek_bench": Family((*CHARACTERS, "mtp", "flip-1"), most=3),
    **{f"{name}_bench": Family(("ngram", "flip-1"), most=2) for name in BRANCHES},
    **{f"{name}_bench": Family(("ngram", "flip-1"), most=3) for name in SMALL},
    "eagle3_bench": Family(("eagle3", f"eagle3{LOOKUP}")),
    "eagle3_theirs_bench": Family(("eagle3",), most=3),
    "eagle3_hybrid_bench": Family(("eagle3",)),
    "eagle3_gpt_oss_bench": Family(("eagle3",)),
    "peagle_bench": Family(("eagle3",), most=4),
    "dflash_bench": Family(("dflash", f"dflash{LOOKUP}")),
    "dflash_theirs_bench": Family(("dflash",), most=3),
    "dflash_hybrid_bench": Family(("dflash",)),
    "draft_model_bench": Family(("draft_model", f"draft_model{LOOKUP}")),
    "draft_theirs_bench": Family(("draft_model",), most=3),
    "draft_hybrid_bench": Family(("draft_model",), most=3),
    "guided_bench": Family((*CHARACTERS, "none", "flip-1")),
    "guided_hybrid_bench": Family(("mtp",)),
    "guided_eagle3_bench": Family(("eagle3",)),
}


def speculation(family: str) -> Iterator[tuple[str, int]]:
    """A drafter and the drafts of its windows; one that flips draft j needs more than j."""
    yield "none", 0
    for drafter in FAMILIES[family].drafters:
        first = int(drafter.removeprefix("flip-")) if drafter.startswith("flip-") else 0
        for k in range(first + 1, FAMILIES[family].most + 1):
            yield drafter, k


CASES = [
    (family, drafter, k, where)
    for family in FAMILIES
    for drafter, k in speculation(family)
    for where in NEIGHBOURS
    if where != "alone" or family in ("bench", "hybrid_bench")
]


@pytest.mark.parametrize(("family", "drafter", "k", "where"), CASES)
@pytest.mark.rotates(24, always=("-mtp-3-mixed",))
def test_speculation_changes_nothing(
    request: pytest.FixtureRequest, family: str, drafter: str, k: int, where: str
) -> None:
    bench: ParityBench = request.getfixturevalue(family)
    turn = k + len(drafter) + list(NEIGHBOURS).index(where)
    for depth in DEPTHS if request.config.getoption("--full") else [turn % len(DEPTHS)]:
        conditions = Conditions((depth + k) % 2 == 0, shuffle_seed=1 + depth, poison=True)
        answers = bench.run(where, drafter=drafter, k=k, depth=depth, conditions=conditions)
        for name, expected in bench.expected.items():
            assert same(answers[name], expected), f"{name} at depth {depth}: {answers[name]}"
        drafted, accepted = total(answers, "num_drafts"), total(answers, "num_accepted")
        if family.startswith("guided"):  # a hybrid's windows hold no drafts that are forced
            assert accepted > 0 or drafter == "none"
        else:
            assert (drafted > 0) == (drafter != "none")
            assert accepted == drafted or drafter not in ("oracle", "ragged")
            assert accepted > drafted // 8 or family not in RIGHT or drafter == "none"
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
