"""Costs that a start measured wrongly, and what steps teach of them."""

from __future__ import annotations

import numpy as np
import pytest
from support.fakes.loop import worthwhile
from surestep_scheduler.speculation.draft_length import (
    DraftChoice,
    Expected,
    LearntCosts,
    StepCosts,
    Took,
    draft_lengths,
)

CONTEXT = 200


def table(step: list[float], draft_us: float) -> StepCosts:
    """Of 1, 2, .. input rows, and of any number of drafting ones."""
    rows = list(range(1, len(step) + 1))
    measured = StepCosts.measured((rows, step), ([1, 2], [draft_us] * 2), 0.5, max_tokens=32)
    assert measured is not None
    return measured


TRUE = table([8000, 8200, 8400, 8600, 8800], 800)
# One that makes drafts look dear, as the step of one row was timed in a lull, and one the opposite.
MISLED = (table([6000, 9000, 9400, 9800, 10200], 1500), table([11000, 8200, 8300, 8400, 8500], 200))


def choose(costs: StepCosts, acceptance: float) -> DraftChoice:
    choice = draft_lengths(
        np.array([acceptance]),
        np.array([4]),
        np.array([CONTEXT]),
        num_tokens=1,
        costs=costs,
        overhead_us=0.0,
        catches_up=False,
    )
    return worthwhile(choice)


def run_steps(costs: LearntCosts, truth: StepCosts, drafts: list[int], slower: float = 1.0) -> None:
    """Steps of one row, as long as `truth` says."""
    for length in drafts:
        expected = Expected(1.0, float(length * costs.now.draft[1]))
        rows = truth.step[1 + length] + truth.per_context_token * CONTEXT * (1 + length)
        took = Took(float(rows) * slower, float(length * truth.draft[1]) * slower)
        costs.observe(expected, took, np.array([CONTEXT]), np.array([length]))


@pytest.mark.parametrize("measured", MISLED)
@pytest.mark.parametrize("acceptance", [0.05, 0.5, 0.8])
def test_probes_correct_a_measurement(measured: StepCosts, acceptance: float) -> None:
    right = choose(TRUE, acceptance).lengths
    wrong = choose(measured, acceptance).lengths
    costs = LearntCosts(measured)
    for _ in range(30):
        length = int(choose(costs.now, acceptance).lengths[0])
        run_steps(costs, TRUE, [length] * 49 + [2])
    assert abs(int(choose(costs.now, acceptance).lengths[0]) - int(right[0])) <= 1
    assert (choose(costs.now, acceptance).lengths > 0) == (right > 0)
    if acceptance == 0.5:
        assert (wrong > 0) != (right > 0) or wrong > right  # the measurement did mislead


def test_a_busy_machine_makes_all_costs_larger_alike() -> None:
    costs = LearntCosts(TRUE)
    run_steps(costs, TRUE, [0] * 400, slower=3.0)
    for learnt, true in ((costs.now.step, TRUE.step), (costs.now.draft, TRUE.draft)):
        assert learnt[1:] == pytest.approx(3 * true[1:], rel=0.02)
    assert choose(costs.now, 0.5).lengths == choose(TRUE, 0.5).lengths


@pytest.mark.parametrize("took", [Took(1e6, 0.0), Took(0.0, 0.0), Took(8000.0, 0.0)])
def test_what_was_interrupted_or_is_not_told_teaches_nothing(took: Took) -> None:
    costs = LearntCosts(TRUE)
    for _ in range(100):
        costs.observe(Expected(9000.0, 800.0), took, np.array([CONTEXT]), np.array([1]))
    assert costs.now is TRUE


def test_a_step_of_more_rows_than_were_measured_is_taken() -> None:
    costs = LearntCosts(TRUE)
    rows = np.full(40, 9)
    for _ in range(16):
        costs.observe(Expected(1.0), Took(1e5, 0.0), rows, rows)
    assert np.isfinite(costs.now.step).all()


def test_what_drafting_takes_is_learnt_once_and_not_again_until_it_is_used() -> None:
    """What is expected is of the costs as last used: each step shows the same difference."""
    costs = LearntCosts(TRUE)
    took = Took(float(TRUE.step[2]) + 0.5 * 2 * CONTEXT, 3 * float(TRUE.draft[1]))
    for _ in range(32):
        expected = Expected(9000.0, float(costs.now.draft[1]))
        costs.observe(expected, took, np.array([CONTEXT]), np.array([1]))
    assert costs.now.draft[1] == pytest.approx(took.draft_us, rel=0.25)
