"""The chosen draft lengths against all possible ones."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from support.fakes.loop import worthwhile
from surestep_scheduler.speculation.draft_length import (
    DraftChoice,
    LearntCosts,
    Lookups,
    StepCosts,
    draft_lengths,
)

ROWS, CAP = 3, 3


def costs(step: list[float], draft: list[float], per_context_token: float = 0.0) -> StepCosts:
    """Measured at 1, 2, 4, .. input rows and at 1, 2, .. drafted rows."""
    measured = StepCosts.measured(
        ([2**i for i in range(len(step))], step),
        (list(range(1, len(draft) + 1)), draft),
        per_context_token,
        max_tokens=64,
    )
    assert measured is not None
    return measured


def choose(
    acceptance: list[float], table: StepCosts, cap: int = CAP, context: int = 100
) -> DraftChoice:
    rows = len(acceptance)
    choice = draft_lengths(
        np.array(acceptance),
        np.full(rows, cap),
        np.full(rows, context),
        num_tokens=rows,
        costs=table,
        overhead_us=0.0,
        catches_up=False,
    )
    return worthwhile(choice)


def random_costs(rng: np.random.Generator) -> StepCosts:
    step = 5000 + rng.uniform(0, rng.choice([300, 2000]), 5).cumsum()
    draft = rng.uniform(50, 1500) + rng.uniform(0, 200, ROWS).cumsum()
    return costs(step.tolist(), draft.tolist(), float(rng.choice([0, 0.01, 0.2])))


def tokens_per_us(
    lengths: tuple[int, ...],
    acceptance: list[float],
    context: list[int],
    table: StepCosts,
    overhead_us: float,
) -> float:
    """By the definition, row by row."""
    tokens, us = 0.0, overhead_us + float(table.step[ROWS + sum(lengths)])
    for a, length, drafts in zip(acceptance, context, lengths, strict=True):
        tokens += sum(a**j for j in range(drafts + 1))
        us += table.per_context_token * length * (1 + drafts)
    for position in range(CAP):
        us += float(table.draft[sum(drafts > position for drafts in lengths)])
    return tokens / us


@pytest.mark.parametrize("seed", range(40))
def test_near_the_best_and_never_below_none(seed: int) -> None:
    rng = np.random.default_rng(seed)
    table = random_costs(rng)
    acceptance, context = rng.uniform(0.05, 0.98, ROWS), rng.integers(1, 5000, ROWS)
    overhead_us = float(rng.choice([0, 3000]))
    choice = draft_lengths(
        acceptance,
        np.full(ROWS, CAP),
        context,
        num_tokens=ROWS,
        costs=table,
        overhead_us=overhead_us,
        catches_up=False,
    )
    chosen = worthwhile(choice)

    def rate(lengths: tuple[int, ...]) -> float:
        return tokens_per_us(lengths, acceptance.tolist(), context.tolist(), table, overhead_us)

    got = rate(tuple(chosen.lengths.tolist()))
    assert got >= 0.9 * max(map(rate, product(range(CAP + 1), repeat=ROWS)))
    assert got >= rate((0,) * ROWS)


def test_free_drafts_are_all_taken() -> None:
    choice = choose([0.1, 0.5, 0.9], costs([1000, 1000], []))
    assert choice.lengths.tolist() == [3, 3, 3]
    assert choice.price == 0


def test_dear_drafts_are_not_taken() -> None:
    choice = choose([0.9, 0.99, 0.99], costs([1000, 2000, 4000, 8000, 16000], [100, 100, 100]))
    assert choice.lengths.tolist() == [0, 0, 0]
    assert choice.price > 1


def test_the_surest_rows_draft_the_most() -> None:
    choice = choose([0.05, 0.5, 0.95], costs([1000, 1100, 1300, 1800, 2800], [20, 30, 40]))
    lengths = choice.lengths.tolist()
    assert lengths == sorted(lengths)
    assert lengths[0] == 0
    assert lengths[-1] == CAP


def test_the_step_below_a_jump_is_filled() -> None:
    """Marginal costs are 0 up to the jump: a local search would see no reason to stop or go on."""
    table = costs([1000, 1000, 1000, 1000, 3000], [])
    assert choose([0.9, 0.9, 0.9], table, cap=8).lengths.sum() == 8 - ROWS


def test_drafts_of_long_contexts_are_given_up_first() -> None:
    table = costs([1000, 1050, 1100, 1200, 1400], [], per_context_token=0.1)
    choice = draft_lengths(
        np.full(2, 0.7),
        np.full(2, 3),
        np.array([100, 20_000]),
        num_tokens=2,
        costs=table,
        overhead_us=0.0,
        catches_up=False,
    )
    kept, given_up = worthwhile(choice).lengths.tolist()
    assert kept > given_up


@pytest.mark.parametrize(
    ("found", "us", "drafts"), [(1.0, 0.0, 4), (1.0, 3000.0, 0), (0.1, 0.0, 0)]
)
def test_lookups_are_worth_what_they_find(found: float, us: float, drafts: int) -> None:
    """Where a draft is dear, looking pays if it is found often enough for what it takes."""
    jump = StepCosts.measured(([1, 2, 6], [1000, 2400, 2500]), ([], []), 0.0, 64)
    assert jump is not None
    choice = draft_lengths(
        np.array([0.9]),
        np.array([4]),
        np.array([0]),
        num_tokens=1,
        costs=jump,
        overhead_us=0.0,
        catches_up=False,
        lookups=Lookups(np.array([found]), us),
    )
    assert worthwhile(choice).lengths.tolist() == [drafts]


def test_caps_are_kept() -> None:
    table = costs([1000, 1000], [])
    lengths = draft_lengths(
        np.full(4, 0.9),
        np.array([0, 1, 2, 0]),
        np.full(4, 10),
        num_tokens=4,
        costs=table,
        overhead_us=0.0,
        catches_up=True,
    ).lengths
    assert lengths.tolist() == [0, 1, 2, 0]


def test_costs_between_and_beyond_the_measured_points() -> None:
    table = costs([100, 200, 150, 300], [10, 14])
    expected = [100, 175, 175, 175, 237.5, 300, 362.5]
    assert table.step[[1, 2, 3, 4, 6, 8, 10]].tolist() == expected
    assert table.draft[[0, 1, 2, 3]].tolist() == [0, 10, 14, 18]


def test_without_measurements() -> None:
    assert StepCosts.measured(([], []), ([], []), 0.0, 64) is None


def test_further_drafts_of_one_pass_cost_no_more_drafting() -> None:
    one_by_one = costs([1000.0] * 5, [400.0])
    assert choose([0.6], one_by_one).lengths.tolist() == [1]
    at_once = replace(one_by_one, at_once=True)
    assert choose([0.6], at_once).lengths.tolist() == [CAP]
    assert choose([0.6], at_once).draft_us == 400.0
    learnt = LearntCosts(at_once)
    learnt._rebuild()
    assert learnt.now.at_once
