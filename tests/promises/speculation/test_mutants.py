"""The parity matrix and the ledger are able to fail: each known bug, put back, is caught."""

from __future__ import annotations

import pytest
from support.parity.bench import Conditions, ParityBench
from support.parity.family_mutants import GPT_OSS_MUTANTS, HYBRID_MUTANTS
from support.parity.latent_models import LATENT_MUTANTS
from support.parity.mutants import MUTANTS
from surestep_common.invariants import LedgerError

RUNS = [("oracle", 3), ("flip-1", 3), ("ragged", 5), ("eos-mid", 4)]

# What sees the bug: a check while the engine runs, or else only the comparison of tokens.
SEEN_BY_A_CHECK = {
    "counts_by_batch_row": LedgerError,
    "minus_one_as_an_id": IndexError,
    "rejected_drafts_stay": LedgerError,
    "mode_guessed_from_token_counts": LedgerError,
    "tokens_behind_a_stop_id": LedgerError,
    "counts_of_the_step_before": None,
    "accepted_if_any_draft_equals": None,
    "parameters_dropped_at_draft_positions": None,
    "history_without_drafts": None,
    "noise_by_batch_row": None,
}


def wrong_answers(bench: ParityBench) -> set[str]:
    """Requests that one of RUNS answers otherwise than alone without speculation."""
    wrong = set()
    for drafter, k in RUNS:
        answers = bench.run("mixed", drafter=drafter, k=k, depth=1)
        wrong |= {n for n, a in answers.items() if a.token_ids != bench.expected[n].token_ids}
    return wrong


def test_nothing_is_wrong_without_a_mutant(bench: ParityBench) -> None:
    assert wrong_answers(bench) == set()
    assert set(SEEN_BY_A_CHECK) == set(MUTANTS)


@pytest.mark.parametrize("name", MUTANTS)
@pytest.mark.rotates(2)
def test_mutant_is_caught(bench: ParityBench, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    MUTANTS[name](monkeypatch)
    error = SEEN_BY_A_CHECK[name]
    if error is not None:
        with pytest.raises(error):
            wrong_answers(bench)
    else:
        assert wrong_answers(bench)


def wrong_hybrid_answers(bench: ParityBench) -> set[str]:
    """The same for a hybrid; preemptions bring cached prefixes into it."""
    wrong, disorder = set(), Conditions(shuffle_seed=5)
    for where, drafter in (("mixed", "ragged"), ("preempted", "flip-1")):
        answers = bench.run(where, drafter=drafter, k=3, depth=1, conditions=disorder)
        wrong |= {n for n, a in answers.items() if a.token_ids != bench.expected[n].token_ids}
    return wrong


def test_no_hybrid_answer_is_wrong_without_a_mutant(hybrid_bench: ParityBench) -> None:
    assert wrong_hybrid_answers(hybrid_bench) == set()


@pytest.mark.parametrize("name", HYBRID_MUTANTS)
@pytest.mark.rotates(2)
def test_hybrid_mutant_is_caught(
    hybrid_bench: ParityBench, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    HYBRID_MUTANTS[name](monkeypatch)
    if name == "snapshot_of_another_prefix":
        with pytest.raises(LedgerError, match="is not of"):
            wrong_hybrid_answers(hybrid_bench)
    else:
        assert wrong_hybrid_answers(hybrid_bench)


@pytest.mark.parametrize(
    ("family", "name"),
    [
        *(("gpt_oss_bench", name) for name in GPT_OSS_MUTANTS),
        *(("glm_dsa_bench", name) for name in LATENT_MUTANTS),
    ],
)
@pytest.mark.rotates(2)
def test_mutant_of_a_family_is_caught(
    request: pytest.FixtureRequest, family: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench: ParityBench = request.getfixturevalue(family)
    (GPT_OSS_MUTANTS | LATENT_MUTANTS)[name](monkeypatch)
    drafter, k = ("ragged", 5) if family == "gpt_oss_bench" else ("flip-1", 3)
    answers = bench.run("mixed", drafter=drafter, k=k, depth=1)
    assert any(a.token_ids != bench.expected[n].token_ids for n, a in answers.items())
