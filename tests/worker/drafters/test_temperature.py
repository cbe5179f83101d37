"""The drafter's temperature is fitted to what is accepted, the same way on every rank."""

from __future__ import annotations

import random

import numpy as np
import pytest
from surestep_worker.drafters.temperature import FACTORS, DraftTemperature

SEED = 6
K = 3


def run(chance: dict[float, float], num_windows: int, fitted: DraftTemperature) -> list[float]:
    """Factors chosen for windows whose drafts are accepted with a chance that depends on them."""
    rng, chosen = random.Random(SEED), list[float]()
    slots = np.arange(4)
    for _ in range(num_windows // len(slots)):
        factors = fitted.choose(slots).tolist()
        accepted = [
            next((i for i in range(K) if rng.random() > chance[round(f, 2)]), K) for f in factors
        ]
        fitted.observe(slots, np.full(len(slots), K), np.array(accepted))
        chosen += factors
    return chosen


@pytest.mark.parametrize("best", FACTORS)
def test_the_factor_that_is_accepted_most_is_found(best: float) -> None:
    chance = {factor: 0.75 if factor == best else 0.45 for factor in FACTORS}
    chosen = run(chance, 2000, DraftTemperature(4))
    late = [round(factor, 2) for factor in chosen[-400:]]
    assert late.count(best) > 0.8 * len(late)


def test_it_starts_with_the_temperature_of_the_request() -> None:
    chosen = run(dict.fromkeys(FACTORS, 0.6), 64, DraftTemperature(4))
    assert chosen.count(1.0) > 40


def test_it_follows_a_change() -> None:
    fitted = DraftTemperature(4)
    run({f: 0.8 if f == 0.5 else 0.3 for f in FACTORS}, 1000, fitted)
    assert FACTORS[fitted.best] == 0.5
    run({f: 0.8 if f == 1.4 else 0.3 for f in FACTORS}, 4000, fitted)
    assert FACTORS[fitted.best] == 1.4


def test_a_fixed_factor_stays() -> None:
    chosen = run({0.3: 0.1}, 100, DraftTemperature(4, fixed=0.3))
    assert {round(factor, 2) for factor in chosen} == {0.3}


def test_two_ranks_choose_alike() -> None:
    chance = {factor: 0.2 + 0.1 * i for i, factor in enumerate(FACTORS)}
    assert run(chance, 400, DraftTemperature(4)) == run(chance, 400, DraftTemperature(4))
