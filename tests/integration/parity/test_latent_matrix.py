"""Speculation never changes a token of models with latent attention, dense or sparse.

Requests are longer than what an indexer chooses. Expected is what a request answers alone, at depth
0, without speculation or prefix cache hits. In every run rows stand in random order, results come
late at random, and whatever belongs to nobody, latents and index keys alike, is NaN or out of range.
"""

from __future__ import annotations

import pytest
from support.parity.bench import NEIGHBOURS, Conditions, ParityBench, same, total
from support.parity.latent_models import LATENT_MUTANTS

DRAFTERS = ("mtp", "ngram", "oracle", "garbage", "ragged", "flip-1")
SPECULATION = [("none", 0), *((name, k) for k in range(1, 4) for name in DRAFTERS)]
WHERE = [name for name in NEIGHBOURS if name != "alone"]


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize(("drafter", "k"), SPECULATION)
@pytest.mark.parametrize("family", ["glm_dsa", "deepseek"])
@pytest.mark.rotates(12, always=("glm_dsa-mtp-3-mixed", "glm_dsa-flip-1-2-preempted"))
def test_speculation_changes_nothing(
    request: pytest.FixtureRequest, family: str, drafter: str, k: int, where: str
) -> None:
    bench: ParityBench = request.getfixturevalue(f"{family}_bench")
    depths = (0, 1, 2) if request.config.getoption("--full") else [(k + len(drafter)) % 3]
    for depth in depths:
        conditions = Conditions(k % 2 == 0, shuffle_seed=1 + depth, poison=True)
        answers = bench.run(where, drafter=drafter, k=k, depth=depth, conditions=conditions)
        for name, expected in bench.expected.items():
            assert same(answers[name], expected), f"{name} at depth {depth}: {answers[name]}"
        drafted, accepted = total(answers, "num_drafts"), total(answers, "num_accepted")
        assert (drafted > 0) == (k > 0)
        assert (accepted == drafted) or drafter not in ("oracle", "ragged")
        assert (total(answers, "num_preemptions") > 0) == (where == "preempted")


@pytest.mark.parametrize("name", LATENT_MUTANTS)
@pytest.mark.rotates(2)
def test_mutant_is_caught(
    glm_dsa_bench: ParityBench, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    LATENT_MUTANTS[name](monkeypatch)
    answers = glm_dsa_bench.run("mixed", drafter="flip-1", k=3, depth=1)
    assert any(a.token_ids != glm_dsa_bench.expected[n].token_ids for n, a in answers.items())
